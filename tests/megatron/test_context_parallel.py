"""Attention of a pack whose tokens ranks share out is that of the whole pack, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.harness import ask
from tests.support.quick import cases

pytestmark = [pytest.mark.slow, pytest.mark.waits, pytest.mark.versions]

CHUNKS = (3, 1, 7, 2)
WINDOWS, GROUPS = (None, 1, 5, 100), (4, 2, 1)
ROUNDING = {"float32": 2e-6, "bfloat16": 2e-2}


@pytest.mark.parametrize("ranks", cases([2, 3, 4], quick=(2,)))
def test_attention_equals_that_of_whole_packs(ranks: int) -> None:
    """With windows shorter and longer than a chunk and than a segment, and queries that share keys."""
    asked: dict[str, dict[str, Any]] = {
        f"{dtype}, window {window}, {groups} groups": {
            "lengths": [2 * ranks * chunk for chunk in CHUNKS], "window": window, "groups": groups, "dtype": dtype,
        }
        for dtype, window, groups in itertools.product(ROUNDING, WINDOWS, GROUPS)
    }  # fmt: skip
    for of_rank in ask("context_worker.py", ranks, asked):
        assert of_rank.keys() == asked.keys()
        for name, errors in of_rank.items():
            assert errors.keys() == {"output", "query", "key", "value"}
            if asked[name]["window"] == 1:  # a token alone has nothing to choose from
                errors = {part: errors[part] for part in ("output", "value")}
            assert max(errors.values()) < ROUNDING[asked[name]["dtype"]], (name, errors)
