"""Rows reach exactly the ranks they are meant for, unchanged."""

from distributed.harness import launch


def test_rows_between_three_ranks() -> None:
    launch("exchange_worker.py", 3)
