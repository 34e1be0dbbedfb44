"""Scores of responses: rules, Python functions in worker processes that can be killed, judges, reward models."""
