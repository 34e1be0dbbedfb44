"""Reservation of a run directory with a file, on file systems without locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megappo.doctor.machine import disk
from megappo.runtime import lock as room
from megappo.runtime.holder import NAME, Holder, read, release, take, this_process
from megappo.runtime.lock import locked_directory
from megappo.runtime.process import Runtime

pytestmark = pytest.mark.waits

JOB = {"SLURM_JOB_ID": "7"}
# A run of one process on a file system without locks. The run prints a line after it reserves the directory.
RUN = """
import errno, fcntl, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
def flock(*_): raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = flock
from megappo.runtime import lock
from megappo.runtime.process import Runtime
lock.PATIENCE_SECONDS = 0.5
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    with lock.locked_directory(Path(sys.argv[1]), Runtime(0, 1, 0, torch.device("cpu"))):
        print("reserved", flush=True)
        sys.stdin.readline()
except ValueError as error:
    print(error, flush=True)
"""


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(room, "PATIENCE_SECONDS", 0.3)


def start(directory: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(directory)], env=environment | variables, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def end(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=60)


def test_second_submission_of_a_job_is_refused(tmp_path: Path) -> None:
    """A second job is refused while the first job runs, and can start afterwards."""
    first, holder = start(tmp_path), tmp_path / NAME
    assert line(first) == "reserved\n" and holder.exists()
    second = start(tmp_path)
    message = line(second)
    end(second)
    assert f"is in use by process {first.pid} on " in message and f"according to {holder}" in message
    end(first)
    assert not holder.exists()
    third = start(tmp_path)
    assert line(third) == "reserved\n"
    end(third)


def test_directory_of_a_killed_run_is_free(tmp_path: Path) -> None:
    """On the same machine, the process has ended. A new process with the same ID has a different start time."""
    first = start(tmp_path)
    assert line(first) == "reserved\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = start(tmp_path)
    assert line(second) == "reserved\n"
    path = tmp_path / NAME
    holder = read(path)
    assert holder is not None and holder.process == second.pid
    assert not holder.is_gone(this_process({})) and replace(holder, start_ticks=1).is_gone(this_process({}))
    end(second)


@pytest.mark.parametrize(
    ("variables", "message"),
    [({**JOB, "SLURM_RESTART_COUNT": "1"}, "reserved"), (JOB, "is in use by process 1 on n1, job 7"),
     ({"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, "is in use by process 1 on n1, job 7"),
     ({}, "is in use by process 1 on n1, job 7")],
    ids=["requeued", "the same attempt", "another job", "no job"],
)  # fmt: skip
def test_killed_run_on_another_machine(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    """Only a later attempt of the same SLURM job can assume that the process has ended."""
    holder = Holder("n1", "another boot", "pid:[1]", 1, 5, "7", 0)
    (tmp_path / NAME).write_text(json.dumps(vars(holder)))
    run = start(tmp_path, **variables)
    assert message in line(run)
    end(run)
    assert read(tmp_path / NAME) == (None if message == "reserved" else holder)


def test_reboot_ends_all_processes() -> None:
    own = this_process({})
    assert replace(own, boot="another").is_gone(own)
    assert not replace(own, namespace="pid:[1]", start_ticks=1).is_gone(own)
    assert not replace(own, host="n1", boot="another").is_gone(own)


def test_file_with_write_error_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, an empty file would otherwise block all later starts."""

    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        take(tmp_path / NAME, this_process({}))
    assert not (tmp_path / NAME).exists()


@pytest.mark.usefixtures("no_locks")
def test_failed_start_releases_the_directory(tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock file cannot be written after the reservation file was created."""

    def fail() -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    own = Holder("n1", "", "", 1, 5)
    monkeypatch.setattr(room, "this_process", lambda _: own)
    monkeypatch.setattr(room.socket, "gethostname", fail)
    with (
        pytest.raises(ValueError, match="cannot be written or locked: No space left"),
        locked_directory(tmp_path / "run", runtime),
    ):
        raise AssertionError("the start continues")
    assert not (tmp_path / "run" / NAME).exists()


@pytest.mark.parametrize("content", ["", "{}", "no JSON", '{"host": "n1"}'])
def test_invalid_reservation_file_is_not_removed(tmp_path: Path, content: str) -> None:
    """The other process may still be writing the file."""
    (tmp_path / NAME).write_text(content)
    other = take(tmp_path / NAME, this_process({}))
    assert other is not None and (tmp_path / NAME).read_text() == content


def test_only_one_start_replaces_an_old_file(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps(vars(replace(this_process({}), start_ticks=1))))
    runs = [start(tmp_path) for _ in range(4)]
    messages = [line(run) for run in runs]
    assert messages.count("reserved\n") == 1 and sum("is in use by" in w for w in messages) == 3
    for run in runs:
        end(run)


def test_file_of_a_different_process_is_not_removed(tmp_path: Path) -> None:
    other = Holder("n1", "", "", 1, 5)
    (tmp_path / NAME).write_text(json.dumps(vars(other)))
    release(tmp_path / NAME, this_process({}))
    assert read(tmp_path / NAME) == other


@pytest.mark.usefixtures("no_locks")
def test_start_and_doctor_report_missing_locks(
    tmp_path: Path, runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked_directory(tmp_path / "run", runtime) as directory:
        directory.check()
        assert (tmp_path / "run" / NAME).exists()
        with pytest.raises(ValueError, match="is in use by process"), locked_directory(tmp_path / "run", runtime):
            raise AssertionError("a second job is accepted")
    assert "has no locks, so the file lock.holder reserves the directory for this run" in capsys.readouterr().err
    assert not (tmp_path / "run" / NAME).exists()
    assert any("has no locks; the file lock.holder replaces" in f.text for f in disk(tmp_path) if f.state == "slow")


def test_file_system_with_locks_needs_no_file(tmp_path: Path, runtime: Runtime) -> None:
    with locked_directory(tmp_path / "run", runtime):
        assert not (tmp_path / "run" / NAME).exists()
    assert not any("no locks" in f.text for f in disk(tmp_path))
