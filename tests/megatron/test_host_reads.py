"""The number of host reads of a microbatch does not grow with the number of layers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.harness import run_worker
from tests.support.models import write_model

pytestmark = [pytest.mark.slow, pytest.mark.waits, pytest.mark.versions]

MICROBATCHES = 3
CASES: dict[str, dict[str, Any]] = {
    "one": {"tp": 1, "pp": 1, "recompute": "none"},
    "full": {"tp": 1, "pp": 1, "recompute": "full"},
    "sp2": {"tp": 2, "pp": 1, "recompute": "none"},
    "pp2": {"tp": 1, "pp": 2, "recompute": "none"},
    "cp2": {"tp": 1, "pp": 1, "cp": 2, "recompute": "none"},
}


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Return the host reads of each case with two and with four layers."""
    root = tmp_path_factory.mktemp("layers")
    folders = [str(write_model(root / str(n), "qwen3", 3, num_hidden_layers=n)) for n in (2, 4)]
    counts: dict[str, list[int]] = run_worker("reads_worker.py", 2, {"folders": folders, "cases": CASES})
    return counts


@pytest.mark.parametrize("name", CASES)
def test_host_reads_do_not_grow_with_layers(reads: dict[str, list[int]], name: str) -> None:
    few, many = reads[name]
    assert few == many
    assert few <= 4 * MICROBATCHES
