"""Runs write the names that an earlier version wrote, so that run folders can be resumed and inspected later.

`disk_names.json` contains the names that revision 3460b3b wrote in a quickstart with saved experience.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from tests.support.attempts import attempts, train

pytestmark = [pytest.mark.slow, pytest.mark.waits]

NAMES = json.loads(Path(__file__).with_name("disk_names.json").read_text())
OTHERS = ("settings", "metrics", "versions", "own_files")
"""Parts of a checkpoint's content with names of settings, metrics, packages and files."""
REPLACED = {f"architectures.{role}.rope_parameters" for role in ("actor", "critic")}
"""Names that a later version computes anew when it reads a checkpoint without them."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with the settings of the recorded run."""
    folder = tmp_path_factory.mktemp("names")
    overrides = ("run.steps=3", "checkpoint.every_steps=2", "logging.save_experience={}", "evaluation=null")
    attempts(folder, train(folder / "run", *overrides))
    return folder / "run"


def keys(value: Any, prefix: str = "", depth: int = 3) -> Iterator[str]:
    """Yield the dotted keys of nested mappings, down to a depth."""
    if isinstance(value, dict) and depth:
        for name, inner in value.items():
            yield prefix + name
            yield from keys(inner, f"{prefix}{name}.", depth - 1)


def json_lines(path: Path) -> set[str]:
    """Return the keys of all lines of a file."""
    return {name for line in path.read_text().splitlines() for name in json.loads(line)}


def test_checkpoint_names(run: Path) -> None:
    folder = run / "checkpoints" / "step-000002"
    body = json.loads((folder / "checkpoint.json").read_text())["body"]
    assert set(NAMES["checkpoint.json"]) <= set(body)
    content = {name: value for name, value in body["content"].items() if name not in OTHERS}
    assert set(NAMES["checkpoint content"]) - set(keys(content)) == REPLACED
    assert set(OTHERS) <= set(body["content"])
    assert list(torch.load(folder / "random-00000.pt", weights_only=True)) == NAMES["random states"]


@pytest.mark.parametrize("file", ["metrics.jsonl", "samples.jsonl"])
def test_names_of_metrics_and_samples(run: Path, file: str) -> None:
    assert set(NAMES[file]) - json_lines(run / file) == set()


def test_columns_of_saved_experience(run: Path) -> None:
    columns = pq.read_schema(run / "experience" / "step-000002" / "rank-00000.parquet").names
    assert set(NAMES["experience"]) - set(columns) == set()
