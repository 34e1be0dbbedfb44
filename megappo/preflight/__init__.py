"""Preparation of a run: resolved settings for all commands, and the inputs of the training."""
