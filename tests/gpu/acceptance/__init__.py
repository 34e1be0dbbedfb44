"""The steps of `tests/gpu/gpu_acceptance.py`: what they find, and how they are run within a time.

`table`, `registry`, `runner` and `wheels` need nothing but Python, so that the command starts where packages are still
missing; the steps themselves run in a worker process.
"""
