"""Metrics of a step, and their output."""
