"""Output of a run for its user: console, logs, metrics, profiles and saved samples."""
