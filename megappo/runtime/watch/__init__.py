"""Deadlines, failures and signals that end a run on all ranks."""
