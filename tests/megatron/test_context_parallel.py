"""Attention over a pack that is split across ranks equals attention over the whole pack, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.harness import run_worker
from tests.support.quick import cases

pytestmark = [pytest.mark.slow, pytest.mark.waits, pytest.mark.versions]

CHUNKS = (3, 1, 7, 2)
WINDOWS, GROUPS = (None, 1, 5, 100), (4, 2, 1)
ROUNDING = {"float32": 2e-6, "bfloat16": 2e-2}


@pytest.mark.parametrize("ranks", cases([2, 3, 4], quick=(2,)))
def test_attention_equals_attention_of_the_whole_pack(ranks: int) -> None:
    """The cases have windows that are shorter and longer than a chunk and a segment, and grouped queries."""
    requests: dict[str, dict[str, Any]] = {
        f"{dtype}, window {window}, {groups} groups": {
            "lengths": [2 * ranks * chunk for chunk in CHUNKS], "window": window, "groups": groups, "dtype": dtype,
        }
        for dtype, window, groups in itertools.product(ROUNDING, WINDOWS, GROUPS)
    }  # fmt: skip
    for of_rank in run_worker("context_worker.py", ranks, requests):
        assert of_rank.keys() == requests.keys()
        for name, errors in of_rank.items():
            assert errors.keys() == {"output", "query", "key", "value"}
            if requests[name]["window"] == 1:  # a single key has a constant weight
                errors = {part: errors[part] for part in ("output", "value")}
            assert max(errors.values()) < ROUNDING[requests[name]["dtype"]], (name, errors)
