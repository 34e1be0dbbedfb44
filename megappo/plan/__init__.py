"""Planner of a run: bytes on every rank, and FLOPs and seconds of every stage.

A plan is computed from the settings and the `config.json` of the models. No model is built and no device is used.
"""
