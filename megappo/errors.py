"""Errors that end a run for a reason its user should read, not a traceback."""


class RunError(RuntimeError):
    """The run cannot go on; the message says why and what to do. The command line exits with code 1."""
