"""The steps of `tests/gpu/gpu_acceptance.py` and their runner with time limits.

`table`, `registry`, `runner` and `wheels` require only Python, so the command starts even if packages are missing.
The steps run in a worker process.
"""
