"""Helpers that tests of data and rewards share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+=<>"


def character_tokenizer(template: str | None = None, alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character of `alphabet` and no unknown token."""
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


TEXTS: list[str] = []


def texts() -> Iterator[dict[str, str]]:
    """Yield `TEXTS` as a data source."""
    yield from ({"prompt": text} for text in TEXTS)


CHATS: list[dict[str, Any]] = []


def chats() -> Iterator[dict[str, Any]]:
    """Yield `CHATS` as a data source."""
    yield from CHATS
