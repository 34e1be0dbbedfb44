"""`changes.jsonl` of a run: changes of settings, versions and code between steps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from megappo.files.plain_files import synced
from megappo.observe.metrics import read_metrics

_FILE = "changes.jsonl"


def record_changes(directory: Path, step: int, changes: Sequence[str]) -> None:
    """Record changes after a step. Records of an earlier attempt for this step or later steps are removed. The file is
    created with the first change. Raises OSError."""
    path = directory / _FILE
    before = read_changes(directory)
    remaining = [(after, sentences) for after, sentences in before if after < step]
    now = [*remaining, (step, list(changes))] if changes else remaining
    if now == before:
        return
    partial = path.with_name(f"{_FILE}.partial")
    with synced(partial) as file:
        file.writelines(json.dumps({"step": after, "changes": texts}).encode() + b"\n" for after, texts in now)
    partial.replace(path)


def read_changes(directory: Path) -> list[tuple[int, list[str]]]:
    """Return (last step before the changes, one sentence for each change), in the order of the steps. Raises ValueError
    if the file is damaged."""
    path = directory / _FILE
    lines = read_metrics(path) if path.exists() else []
    return [(line["step"], [*map(str, line.get("changes", []))]) for line in lines]


def change_notes(directory: Path, *, before_step: float = math.inf) -> list[str]:
    """Return a sentence for each record of changes before a step. Raises ValueError if the file is damaged."""
    return [f"after step {n}: {'; '.join(changes)}" for n, changes in read_changes(directory) if n < before_step]
