"""Start of a run: its origin, its models and its other components."""
