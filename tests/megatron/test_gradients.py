"""Gradients of a bfloat16 model are accumulated in float32 over microbatches and data parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.harness import run_worker
from tests.support.models import write_model

pytestmark = [pytest.mark.slow, pytest.mark.waits, pytest.mark.versions]

ROUNDINGS = 12
"""Number of roundings in a sum over the microbatches of all ranks."""


@pytest.mark.parametrize(("processes", "overlap"), [(1, False), (2, False), (2, True)])
def test_sums_of_gradients_are_float32(tmp_path: Path, processes: int, overlap: bool) -> None:
    """The gradient of each microbatch is bfloat16. The sum equals the float64 sum within float32 rounding. A sum in
    bfloat16 has a much larger error."""
    folder = write_model(tmp_path / "model", "qwen3", 3, num_hidden_layers=1, tie_word_embeddings=False)
    errors: dict[str, list[float]] = run_worker(
        "gradients_worker.py", processes, {"folder": str(folder), "overlap": overlap}
    )
    assert len(errors) == 11
    for name, (error, in_bfloat16) in errors.items():
        assert error <= ROUNDINGS * 2.0**-24, name
        assert in_bfloat16 > 1e-4, name
