"""Memory of a run, in bytes."""
