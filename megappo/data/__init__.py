"""Prompts: sources, tokenisation and order."""

from megappo.data.cursor import Cursor
from megappo.data.prompts import PromptDataset
from megappo.data.training import TrainingCursor, TrainingPrompts, read_prompts, training_cursor

__all__ = ["Cursor", "PromptDataset", "TrainingCursor", "TrainingPrompts", "read_prompts", "training_cursor"]
