"""Text files of a run directory: samples, unusual updates and pages of profiles. The files may be of unknown origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megappo.errors import redacted, shortened
from megappo.files.json_values import JSONValue
from megappo.files.plain_files import plain_text
from megappo.observe.metrics import last_records
from megappo.observe.timing.step_profile import newest_page

_MOST_SAMPLES, _MOST_JUMPS = 100, 1_000
_TEXT_CHARACTERS, _REASON_CHARACTERS, _PAGE_CHARACTERS = 2_000, 300, 100_000


def text_of(value: JSONValue, characters: int = _TEXT_CHARACTERS) -> str:
    """Return a text for the page, shortened and without secrets."""
    return shortened(redacted(value if isinstance(value, str) else "" if value is None else str(value)), characters)


def written_samples(directory: Path) -> list[dict[str, JSONValue]]:
    """Return the last samples of samples.jsonl, without numbers of tokens. Raises ValueError if the file is damaged."""
    return [
        {
            "step": record["step"],
            "id": None,
            "reward": _number(record.get("score")),
            "length": _number(record.get("tokens")),
            "prompt": text_of(record.get("prompt")),
            "response": text_of(record.get("raw_response")),
            "answer": None if record.get("answer") is None else text_of(record["answer"]),
        }
        for record in _last_of(directory / "samples.jsonl", _MOST_SAMPLES)
    ]


def jumps(directory: Path) -> list[list[JSONValue]]:
    """Return step, title and reasons of the last updates in jumps.jsonl. Raises ValueError if the file is damaged."""
    records = _last_of(directory / "jumps.jsonl", _MOST_JUMPS)
    return [[record["step"], f"{_role(record)} update stands out", _reasons(record)] for record in records]


def _last_of(path: Path, most: int) -> list[dict[str, Any]]:
    return last_records(path, most) if path.exists() else []


def _role(record: Mapping[str, JSONValue]) -> str:
    role = record.get("role")
    return role if role in ("actor", "critic") else "an"


def _reasons(record: Mapping[str, JSONValue]) -> str:
    reasons = record.get("reasons")
    texts = [str(x) for x in reasons] if isinstance(reasons, list) else []
    return text_of(f"update {record.get('minibatch')}: {', '.join(texts)}", _REASON_CHARACTERS)


def profile(directory: Path) -> Iterator[str]:
    """Yield the page of the newest profile, if any. Raises ValueError if the page cannot be read."""
    path = newest_page(directory)
    if path is not None:
        try:
            yield text_of(plain_text(path), _PAGE_CHARACTERS)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read") from error


def _number(value: JSONValue) -> float | None:
    """Return a number that JSON and JavaScript can represent, or None for other values."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    return None
