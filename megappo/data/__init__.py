"""Prompts: where they come from, how they become tokens, in which order they are taken."""

from megappo.data.cursor import Cursor
from megappo.data.prompts import PromptDataset

__all__ = ["Cursor", "PromptDataset"]
