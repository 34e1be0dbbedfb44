"""Timeout of the watchdog, which is counted from the last tokens, microbatch or weights of any rank."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megappo.config.schema import PHASES
from megappo.errors import HANG, RUN_ERROR
from megappo.observe.terminal.progress import MICROBATCHES, PROGRESS
from megappo.runtime.process import Runtime
from megappo.runtime.watch.watchdog import GENERATING, Limits, Watchdog

GENERATES_SECONDS = 4.0
LIMIT_SECONDS = 1.5
REPORT_SECONDS = 1.0
"""Interval between the progress reports of a rank. The last report can be older by this time."""
LOOP_SECONDS = 0.1
"""Interval of the loop, which reports tokens and records the duration."""
SHORTEST = GENERATES_SECONDS + LIMIT_SECONDS - REPORT_SECONDS - 2 * LOOP_SECONDS
"""Shortest duration. The last tokens and the last record can be one interval old."""


def rank_of_two(rank: int, folder: Path, phase: str, generating: tuple[str, ...], lasted: Any) -> None:
    """Rank 0 generates tokens or microbatches for some time while rank 1 waits. Both ranks then hang. `lasted` records
    the duration."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    runtime = Runtime(rank, 2, rank, torch.device("cpu"))
    watchdog = Watchdog(folder, Limits(LIMIT_SECONDS, generating=generating), runtime)
    watchdog.start()
    watchdog.enter(phase)
    start = time.monotonic()
    while True:
        lasted[rank] = time.monotonic() - start
        if rank == 0 and lasted[rank] < GENERATES_SECONDS:
            if phase == "forward":
                PROGRESS.add(MICROBATCHES, 1)
            else:
                watchdog.made_tokens()
        time.sleep(LOOP_SECONDS)


def run_both_ranks(folder: Path, phase: str, generating: tuple[str, ...], code: int = HANG) -> list[float]:
    """Run both ranks until the watchdogs end them with this exit code. Returns the durations in seconds."""
    context = multiprocessing.get_context("fork")
    lasted = context.Array("d", 2)
    ranks = [context.Process(target=rank_of_two, args=(rank, folder, phase, generating, lasted)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == code
    return lasted[:]


@pytest.mark.waits
@pytest.mark.parametrize(
    ("phase", "generating", "shortest", "longest"),
    [("rollout", GENERATING, SHORTEST, 40.0), ("update_actor", GENERATING, 1.0, 3.9),
     ("update_actor", PHASES, SHORTEST, 40.0), ("forward", GENERATING, SHORTEST, 40.0)],
    ids=["rollout", "update", "one-step-ahead", "forward"],
)  # fmt: skip
def test_phase_with_progress_is_not_ended(
    phase: str, generating: tuple[str, ...], shortest: float, longest: float, tmp_path: Path
) -> None:
    """The generating rank and the waiting rank are not ended. Without tokens, both ranks end. Updates generate no
    tokens, but with rollouts one step ahead, an update may wait for a rollout. Microbatches also count as progress."""
    lasted = run_both_ranks(tmp_path, phase, generating)
    assert all(shortest <= seconds <= longest for seconds in lasted), lasted
    assert len(list(tmp_path.glob("hang-*/rank-*.txt"))) == 2


@pytest.mark.waits
def test_second_hang_at_one_checkpoint_requests_no_restart(tmp_path: Path) -> None:
    """Exit code 79 would request a restart, and the same hang would repeat forever."""
    for newest, code in (("step-000003", HANG), ("", RUN_ERROR)):
        folder = tmp_path / (newest or "none")
        (folder / "hang-20200101-000000").mkdir(parents=True)
        (folder / "hang-20200101-000000/newest-checkpoint").write_text(newest)  # no newer checkpoint exists
        run_both_ranks(folder, "update_actor", GENERATING, code)
        assert len(list(folder.glob("hang-*/newest-checkpoint"))) == 2
