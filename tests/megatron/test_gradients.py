"""Gradients of a bfloat16 model add up in float32 over microbatches and data parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.harness import ask
from tests.support.models import write_model

pytestmark = [pytest.mark.slow, pytest.mark.waits, pytest.mark.versions]

ROUNDINGS = 12
"""Of a sum of as many microbatches, all ranks together."""


@pytest.mark.parametrize(("processes", "overlap"), [(1, False), (2, False), (2, True)])
def test_sums_of_gradients_are_float32(tmp_path: Path, processes: int, overlap: bool) -> None:
    """Each microbatch's gradient is bfloat16; their sum is that of float64 within float32's rounding, which a sum in
    bfloat16 misses by far."""
    folder = write_model(tmp_path / "model", "qwen3", 3, num_hidden_layers=1, tie_word_embeddings=False)
    found: dict[str, list[float]] = ask("gradients_worker.py", processes, {"folder": str(folder), "overlap": overlap})
    assert len(found) == 11
    for name, (error, in_bfloat16) in found.items():
        assert error <= ROUNDINGS * 2.0**-24, name
        assert in_bfloat16 > 1e-4, name
