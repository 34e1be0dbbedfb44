"""A split vocabulary has the same results as the whole vocabulary and needs one collective."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.harness import run_worker
from tests.support.quick import cases

pytestmark = [pytest.mark.slow, pytest.mark.waits]


@pytest.mark.parametrize(
    ("kind", "ranks"), cases(product(["random", "peaky", "offset+150"], [2, 4]), quick=[("peaky", 2)])
)
def test_split_vocabulary(kind: str, ranks: int) -> None:
    results: dict[str, dict[str, float]] = run_worker("kernels_worker.py", ranks, {"kind": kind})
    assert len(results) == 3 * (2 * 4 + 2)
    for case, errors in results.items():
        assert all(error <= 1.0 for error in errors.values()), (case, errors)
