"""Checks of shared memory and socket names before a run starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megappo.config import Config, load_config
from megappo.plan.inputs import Setup, make_setup
from megappo.plan.memory import bucket_bytes
from megappo.plan.planner import read_models
from megappo.plan.shared_memory import room_problem, shared_buckets_bytes, socket_problem
from tests.support.places import ROOT

SHARE = """
import torch
torch.multiprocessing.set_sharing_strategy("file_system")
torch.empty(1).share_memory_()
"""


def planned(name: str, *overrides: str, on_cuda: bool = False) -> tuple[Config, Setup]:
    """A shipped configuration on two ranks, and its setup."""
    config = load_config(ROOT / "configs" / f"{name}.yaml", overrides)
    return config, make_setup(config, read_models(config, None).models, 2, on_cuda=on_cuda)


@pytest.mark.parametrize(("local_world_size", "owners"), [(None, 1), (2, 1), (1, 1)])
def test_two_buckets_for_each_owner(monkeypatch: pytest.MonkeyPatch, local_world_size: int | None, owners: int) -> None:
    monkeypatch.chdir(ROOT)
    config, setup = planned("sglang_quickstart")
    needed = shared_buckets_bytes(config, setup, 2, local_world_size)
    assert needed == 2 * owners * bucket_bytes(setup) > 0


def test_ranks_of_one_machine_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config, setup = planned("sglang_quickstart")
    assert shared_buckets_bytes(config, setup, 8, 4) == 8 * bucket_bytes(setup)


def test_runs_without_buckets_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded engine has no buckets. GPUs share memory by CUDA IPC, and other machines receive broadcasts."""
    monkeypatch.chdir(ROOT)
    cases = (planned("quickstart", "rollout.engine=transformers"), planned("sglang_disaggregated"))
    assert [shared_buckets_bytes(config, setup, 2, 2) for config, setup in cases] == [0, 0]
    config, setup = planned("sglang_quickstart", "model.dtype=bfloat16", on_cuda=True)
    assert shared_buckets_bytes(config, setup, 2, 2) == 0


def test_a_folder_without_room(tmp_path: Path) -> None:
    assert room_problem(1e3, tmp_path) is None
    problem = room_problem(1e18, tmp_path)
    assert problem is not None and f"needs 1e+09 GB of {tmp_path} for buckets, and " in problem
    assert problem.endswith(
        "lower rollout.sync_bucket_bytes, or mount a larger tmpfs there (containers: --ipc=host or --shm-size=16g)"
    )
    problem = room_problem(2.5e6, tmp_path / "none")
    assert problem is not None and f"needs 2.5 MB of shared memory, and {tmp_path / 'none'} does not exist" in problem


def test_folder_without_write_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    problem = room_problem(1e3, tmp_path)
    assert problem is not None and f"{tmp_path}, which is not writable; mount a larger tmpfs there" in problem


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a path short enough to be extended to any length that the test needs."""
    folder = Path(tempfile.mkdtemp(prefix="m-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def folder_of(length: int, parent: Path) -> Path:
    """A new folder whose path has `length` bytes."""
    folder = parent / ("x" * (length - len(str(parent)) - 1))
    folder.mkdir()
    return folder


@pytest.mark.waits
@pytest.mark.parametrize("variable", ["TMPDIR", "TMP"])
def test_the_longest_folder_of_torch(short_folder: Path, variable: str) -> None:
    """torch shares memory with a temporary folder of 73 bytes, and fails with 74."""
    others = {name: value for name, value in os.environ.items() if name not in {"TMPDIR", "TMP", "TEMP", "TEMPDIR"}}
    for length, works in ((73, True), (74, False)):
        environment = others | {variable: str(folder_of(length, short_folder))}
        shared = subprocess.run([sys.executable, "-c", SHARE], env=environment, capture_output=True, check=False)
        assert (shared.returncode == 0) is works, shared.stderr.decode()[-1000:]
        problem = socket_problem(environment)
        assert (problem is None) is works
    assert problem is not None and "has 74 bytes, and a folder for the sockets" in problem and "at most 73" in problem


def test_unusable_temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert socket_problem({}) is None
    problem = socket_problem({"TMPDIR": "/nonexistent"})
    assert problem is not None and "and TMPDIR=/nonexistent is not one; export TMPDIR=/tmp" in problem
    assert socket_problem({"TMPDIR": "/tmp", "TMP": "/nonexistent"}) is None, "torch reads the first one alone"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    problem = socket_problem({"TEMP": "/tmp"})
    assert problem is not None and "and TEMP=/tmp is not one" in problem
