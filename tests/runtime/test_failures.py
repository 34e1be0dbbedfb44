"""An error of one rank ends all ranks within seconds. Each rank reports the error and the rank."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import megappo.megatron  # noqa: F401 - imported once for all ranks
from megappo.config.schema import RuntimeSettings
from megappo.errors import FAULT, RUN_ERROR, USER_ERROR, ConfigError, Interrupted, RunError, verdict_of
from megappo.network.store import free_port
from megappo.runtime.process import Runtime, start_runtime

pytestmark = pytest.mark.waits

WITHIN_SECONDS = 10.0
FOREVER = 10**6


class Ended(NamedTuple):
    """End of a rank."""

    code: int
    stderr: str
    torchrun_message: str
    """Message in the error file of torchrun."""
    seconds: float


Body = Callable[[Runtime], None]


def of_rank(rank: int, ranks: int, folder: Path, port: int, body: Body, under_torchrun: bool) -> None:
    """Run one rank in a separate process."""
    errors = os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - replaces the stream of pytest
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if under_torchrun:
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"torchrun-{rank}")
    dist.destroy_process_group = lambda *_: time.sleep(FOREVER)  # NCCL can block here if other ranks wait for this rank
    with start_runtime(RuntimeSettings(threads_per_rank=1)) as runtime:
        runtime.failures.before_leaving(lambda failure: (folder / f"last-{rank}").write_text(str(failure.rank)))
        (folder / f"begun-{rank}").write_text(str(time.monotonic()))
        try:
            with runtime.failures.reporting():
                body(runtime)
        finally:
            time.sleep(FOREVER)  # a resource that cannot be closed


def ends(folder: Path, body: Body, *, ranks: int = 2, under_torchrun: bool = False) -> list[Ended]:
    """Run a body on some ranks until all ranks end. Seconds are counted from the time at which all ranks had
    started."""
    context, port = multiprocessing.get_context("fork"), free_port("127.0.0.1")
    started = [
        context.Process(target=of_rank, args=(r, ranks, folder, port, body, under_torchrun)) for r in range(ranks)
    ]
    seconds = [0.0] * ranks
    for process in started:
        process.start()
    for rank, process in enumerate(started):
        process.join(60)
        seconds[rank] = time.monotonic()
    for process in started:
        process.kill()
    start = max(float((folder / f"begun-{rank}").read_text()) for rank in range(ranks))
    paths = [folder / f"torchrun-{rank}" for rank in range(ranks)]
    messages = [json.loads(path.read_text())["message"]["message"] if path.exists() else "" for path in paths]
    outputs = [(folder / f"stderr-{rank}").read_text() for rank in range(ranks)]
    outputs = ["".join(line for line in text.splitlines(True) if "cpp_extension" not in line) for text in outputs]
    codes = [process.exitcode if process.exitcode is not None else FOREVER for process in started]
    return [Ended(*fields) for fields in zip(codes, outputs, messages, (s - start for s in seconds), strict=True)]


def raised_alone(runtime: Runtime) -> None:
    if runtime.rank == 1:
        raise KeyError("no such room")
    dist.all_reduce(torch.zeros(1))


def raised_in_a_thread(runtime: Runtime) -> None:
    """Errors count only in threads of megappo. The meaning of errors in other threads is unknown."""
    if runtime.rank == 1:
        runtime.notices.each_turn(lambda: raised_alone(runtime))
        threading.Thread(target=lambda: 1 / 0, daemon=True).start()
        threading.Event().wait()
    dist.all_reduce(torch.zeros(1))
    threading.Event().wait()


def raised_by_rank_0(runtime: Runtime) -> None:
    if runtime.rank == 0:
        raise RunError("the disk is full; make room")
    dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("body", [raised_alone, raised_in_a_thread])
def test_other_ranks_report_the_failed_rank(body: Body, tmp_path: Path) -> None:
    """The other ranks end during any wait, even if the failed rank cannot close a resource."""
    first, second = ends(tmp_path, body)
    sentence = f"megappo: error on rank 1: KeyError: 'no such room' ({__file__}:"
    assert (first.code, second.code) == (1, 1)
    assert max(first.seconds, second.seconds) < WITHIN_SECONDS
    assert sentence in first.stderr and "Traceback" not in first.stderr, first.stderr
    assert sentence in second.stderr and second.stderr.count("Traceback") == 1, second.stderr
    assert [(tmp_path / f"last-{rank}").read_text() for rank in range(2)] == ["1", "1"]


def test_torchrun_receives_the_error_on_every_rank(tmp_path: Path) -> None:
    first, second = ends(tmp_path, raised_by_rank_0, under_torchrun=True)
    assert (first.code, second.code) == (1, 1)
    assert first.torchrun_message == "megappo: error: the disk is full; make room"
    assert second.torchrun_message == "megappo: error on rank 0: the disk is full; make room"
    assert "error" not in first.stderr + second.stderr


def device_fault(runtime: Runtime) -> None:
    if runtime.rank == 1:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
    dist.all_reduce(torch.zeros(1))


def test_device_fault_has_a_separate_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job script requeues for this exit code, and excludes the node of the recorded rank."""
    monkeypatch.setenv("MEGAPPO_RANK_LOGS", str(tmp_path))
    first, second = ends(tmp_path, device_fault)
    assert (first.code, second.code) == (FAULT, FAULT)
    assert "megappo: error on rank 1: AcceleratorError: CUDA error: uncorrectable ECC error" in first.stderr
    assert (tmp_path / "first-failed").read_text() == "1\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), FAULT),
        (dist.DistBackendError("NCCL communicator was aborted on rank 3"), FAULT),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), RUN_ERROR),
        (torch.OutOfMemoryError("CUDA out of memory"), RUN_ERROR),
        (RuntimeError("CUDA error"), RUN_ERROR),
        (RunError("too many rewards failed"), RUN_ERROR),
        (ConfigError("a wrong setting"), USER_ERROR),
    ],
)
def test_exit_code_of_device_and_communication_errors(error: Exception, code: int) -> None:
    assert verdict_of(error).code == code


def raised_by_all(runtime: Runtime) -> None:
    dist.all_reduce(torch.zeros(1))
    raise RunError("the folder is lost")


def test_error_of_all_ranks_names_no_rank(tmp_path: Path) -> None:
    for ended in ends(tmp_path, raised_by_all):
        assert (ended.code, ended.stderr) == (1, "megappo: error: the folder is lost\n")


def killed(runtime: Runtime) -> None:
    if runtime.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def killed_while_nothing_breaks(runtime: Runtime) -> None:
    """The other rank waits without a collective."""
    if runtime.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


@pytest.mark.parametrize("body", [killed, killed_while_nothing_breaks])
def test_killed_rank_is_reported(body: Body, tmp_path: Path) -> None:
    """The next rank on the same machine reports the killed rank. A lost connection is not reported as the reason."""
    first, second = ends(tmp_path, body)
    assert (first.code, second.code) == (1, -signal.SIGKILL)
    assert first.seconds < 5
    assert re.search(r"megappo: error on rank 1: process \d+ on \S+ ended without a message, as after", first.stderr)
    assert "Traceback" not in first.stderr


def test_killed_rank_on_another_machine_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection is reported without a reason. By design, this takes nine seconds: five to wait for a reason,
    and four to close resources."""
    monkeypatch.setattr("megappo.runtime.watch.failures.find_next_rank", lambda *_: None)
    first, second = ends(tmp_path, killed)
    assert (first.code, second.code) == (FAULT, -signal.SIGKILL)
    assert first.seconds < 2 * WITHIN_SECONDS
    assert "another rank ended without a message or is unreachable" in first.stderr
    assert "Traceback" not in first.stderr


def lost_before_the_reason(runtime: Runtime) -> None:
    """Rank 0 detects a lost connection before rank 1 reports the reason."""
    if runtime.rank == 0:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
    time.sleep(2)
    raise RunError("no room is left")


def test_lost_connection_waits_for_the_reason(tmp_path: Path) -> None:
    for ended in ends(tmp_path, lost_before_the_reason):
        assert (ended.code, ended.stderr) == (1, "megappo: error on rank 1: no room is left\n")


def stopped(_runtime: Runtime) -> None:
    raise Interrupted(signal.SIGTERM)


def test_stopped_run_ends_with_unclosed_resource(tmp_path: Path) -> None:
    """The exit code requests a restart, and the run ends before a scheduler kills the run."""
    for ended in ends(tmp_path, stopped):
        assert ended.code == 85 and ended.seconds < 30, ended
        assert "a resource was not closed within 20 seconds" in ended.stderr


def test_single_rank_reports_error_with_unclosed_resource(tmp_path: Path) -> None:
    (ended,) = ends(tmp_path, raised_by_rank_0, ranks=1)
    assert ended.code == 1 and ended.seconds < 30
    assert ended.stderr.endswith("megappo: error: the disk is full; make room\n"), ended.stderr


def done(runtime: Runtime) -> None:
    runtime.failures.done(close_within_seconds=1.0)


def test_finished_run_succeeds_with_unclosed_resource(tmp_path: Path) -> None:
    for ended in ends(tmp_path, done):
        assert ended.code == 0 and ended.seconds < WITHIN_SECONDS
        assert "a resource was not closed within 1 seconds" in ended.stderr


def test_single_rank_raises_the_original_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    settings = RuntimeSettings(threads_per_rank=1)
    with pytest.raises(KeyError), start_runtime(settings) as runtime, runtime.failures.reporting():
        raise KeyError("no such room")
    assert not dist.is_initialized()
