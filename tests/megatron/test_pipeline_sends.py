"""What a pipeline stage sends while it computes arrives as it was, however late it is received."""

from __future__ import annotations

import pytest

from tests.support.harness import launch

pytestmark = [pytest.mark.slow, pytest.mark.waits, pytest.mark.versions]


def test_outputs_that_are_freed_arrive() -> None:
    launch("sends_worker.py", 2, 64, 4096, 100000, timeout_seconds=60)
