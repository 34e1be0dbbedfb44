"""Helpers that tests of data and rewards share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megappo.config.sections.data import DataSourceSettings

ROLES = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
"""A chat template with the first letter of each role."""
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


def records(folder: Path, *prompts: Any) -> DataSourceSettings:
    """Write prompts with the answer 1 as a file, and return its settings."""
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts))
    return DataSourceSettings(source=str(path))
