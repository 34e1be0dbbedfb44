"""Checks of the text files of a Hugging Face folder. An error names the damaged file before a library fails to read
it."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from megappo.errors import link_to_nothing, show
from megappo.files.plain_files import check_folder, plain_text

OF_TOKENIZERS = (
    "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "chat_template.json", "chat_template.jinja",
)  # fmt: skip
"""Files that transformers reads for a tokenizer. Each JSON file among them must contain an object."""
_AGAIN = "fetch or save it again"


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError with a sentence that names the file for any other content."""
    try:
        content = json.loads(_text(path))
    except RecursionError:
        raise ValueError(f"{path} is nested too deep to be read; {_AGAIN}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}; {_AGAIN}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {show(content)}, must be a JSON object; {_AGAIN}")
    return content


def check_texts(folder: Path, names: tuple[str, ...]) -> None:
    """Check that each of the files is missing or readable as its type.

    Raises ValueError for the first unreadable file, and the errors of `check_folder`.
    """
    check_folder(folder)
    for path in (folder / name for name in names):
        if path.exists():
            state = path.stat()
            _check(path, state.st_mtime_ns, state.st_size)


@lru_cache
def _check(path: Path, changed_ns: int, size: int) -> None:
    """Check a file once per modification time and size. Tokenizer files have many megabytes, and each role checks
    them."""
    if path.suffix == ".json":
        read_object(path)
    else:
        _text(path)


def _text(path: Path) -> str:
    try:
        return plain_text(path)
    except OSError as error:
        if link := link_to_nothing(path):
            raise ValueError(link) from None
        raise ValueError(f"{path} cannot be read: {error.strerror}; {_AGAIN}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); {_AGAIN}") from None
