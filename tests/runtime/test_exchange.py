"""Exchange of tensors: each destination rank receives the unchanged tensor."""

from pathlib import Path

import pytest

from tests.support.harness import launch

pytestmark = [pytest.mark.slow, pytest.mark.waits]


def test_exchange_between_three_ranks() -> None:
    launch("exchange_worker.py", 3)


def test_rank_has_two_connections_to_the_store(tmp_path: Path) -> None:
    """One connection is for the process group and one for all listener threads. All ranks connect to one process."""
    launch("store_worker.py", 2, tmp_path)
