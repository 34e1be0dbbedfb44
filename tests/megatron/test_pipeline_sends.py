"""Outputs that a pipeline stage sends during computation arrive unchanged, also with a late receive."""

from __future__ import annotations

import pytest

from tests.support.harness import launch

pytestmark = [pytest.mark.slow, pytest.mark.waits, pytest.mark.versions]


def test_freed_outputs_arrive_unchanged() -> None:
    launch("sends_worker.py", 2, 64, 4096, 100000, timeout_seconds=60)
