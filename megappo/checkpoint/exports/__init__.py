"""Exports of a checkpoint in the formats of other programs."""
