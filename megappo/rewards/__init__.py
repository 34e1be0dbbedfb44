"""Scores of responses: rules, Python functions in killable workers, reward models."""
