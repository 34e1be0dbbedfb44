"""One SLURM for all tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, virtual_nodes, why_not


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    """Its nodes are free again for the next test, whatever becomes of this one."""
    yield slurm
    slurm.cancel_all()


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no SLURM: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # sockets want a short path
    try:
        with virtual_nodes(folder) as running:
            yield running
    finally:
        shutil.rmtree(folder)
