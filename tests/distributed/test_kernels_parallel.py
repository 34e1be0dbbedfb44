"""A vocabulary split over 2 and 4 ranks gives what the whole one gives, for one collective."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed.harness import launch


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_vocabulary(ranks: int, tmp_path: Path) -> None:
    out = tmp_path / "errors.json"
    launch("kernels_worker.py", ranks, out)
    found: dict[str, dict[str, float]] = json.loads(out.read_text())
    assert len(found) == 3 * 3 * (2 * 4 + 2)
    for case, errors in found.items():
        assert all(error <= 1.0 for error in errors.values()), (case, errors)
