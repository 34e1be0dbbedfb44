"""Tensors reach exactly the ranks they are meant for, unchanged."""

from pathlib import Path

import pytest

from tests.support.harness import launch

pytestmark = [pytest.mark.slow, pytest.mark.waits]


def test_tensors_between_three_ranks() -> None:
    launch("exchange_worker.py", 3)


def test_a_rank_has_two_connections_to_the_store(tmp_path: Path) -> None:
    """One for the process group and one for all threads that listen: hundreds of ranks have them to one process."""
    launch("store_worker.py", 2, tmp_path)
