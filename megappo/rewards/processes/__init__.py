"""Processes that run untrusted functions and can be killed."""
