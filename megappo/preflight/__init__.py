"""Preparation of a run: resolved settings for all commands, and the inputs that are read before training."""
