"""SLURM cluster for all tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, unavailable_reason, virtual_nodes


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    """Provide the cluster, and cancel all jobs after the test."""
    yield slurm
    slurm.cancel_all()


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(f"no SLURM: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # sockets need a short path
    try:
        with virtual_nodes(folder) as running:
            yield running
    finally:
        shutil.rmtree(folder)
