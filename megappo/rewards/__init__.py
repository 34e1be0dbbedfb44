"""Scores of responses: rules, Python functions in killable workers, reward models.

Nothing is imported here: worker processes import this package and must start quickly.
"""
