"""The watchdog's clock: it counts from the last tokens, microbatch or weights of any rank."""

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
from megappo.observe.progress import MICROBATCHES, PROGRESS
from megappo.runtime.process import Runtime
from megappo.runtime.watchdog import GENERATING, Limits, Watchdog

GENERATES_SECONDS = 4.0
LIMIT_SECONDS = 1.5
TOLD_SECONDS = 1.0
"""How seldom a rank tells the others; so much earlier may the last be that they hear of."""
LOOP_SECONDS = 0.1
"""Between two turns of the loop, each of which may tell of tokens and notes how long it has lasted."""
SHORTEST = GENERATES_SECONDS + LIMIT_SECONDS - TOLD_SECONDS - 2 * LOOP_SECONDS
"""The last tokens are made a turn before the end at the latest, and what a rank noted last is a turn old at most."""


def rank_of_two(rank: int, folder: Path, phase: str, generating: tuple[str, ...], lasted: Any) -> None:
    """Rank 0 makes tokens, or microbatches, for a while, rank 1 waits for it; then both hang. Notes how long it
    lasted."""
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


@pytest.mark.waits
@pytest.mark.parametrize(
    ("phase", "generating", "shortest", "longest"),
    [
        ("rollout", GENERATING, SHORTEST, 40.0),
        ("update_actor", GENERATING, 1.0, 3.9),
        ("update_actor", PHASES, SHORTEST, 40.0),
        ("forward", GENERATING, SHORTEST, 40.0),
    ],
    ids=["rollout", "update", "one-step-ahead", "forward"],
)
def test_a_phase_that_makes_tokens_is_not_ended(
    phase: str, generating: tuple[str, ...], shortest: float, longest: float, tmp_path: Path
) -> None:
    """Neither on the rank that makes them nor on one that waits; without tokens both end. Updates make none, but one
    step ahead they may be followed by the wait for a rollout. So it is where microbatches end."""
    context = multiprocessing.get_context("fork")
    lasted = context.Array("d", 2)
    processes = [
        context.Process(target=rank_of_two, args=(rank, tmp_path, phase, generating, lasted)) for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == HANG
    assert all(shortest <= seconds <= longest for seconds in lasted[:]), lasted[:]
    assert len(list(tmp_path.glob("hang-*/rank-*.txt"))) == 2


@pytest.mark.waits
def test_a_run_that_hangs_again_at_the_same_checkpoint_is_not_started_again(tmp_path: Path) -> None:
    """Exit code 79 asks for that; the same hang would come for as long as somebody starts it."""
    context = multiprocessing.get_context("fork")
    lasted = context.Array("d", 2)
    for newest, code in (("step-000003", HANG), ("", RUN_ERROR)):
        folder = tmp_path / (newest or "none")
        (folder / "hang-20200101-000000").mkdir(parents=True)
        (folder / "hang-20200101-000000/newest-checkpoint").write_text(newest)  # now there is none
        ranks = [
            context.Process(target=rank_of_two, args=(rank, folder, "update_actor", GENERATING, lasted))
            for rank in (0, 1)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
            assert rank.exitcode == code
        assert len(list(folder.glob("hang-*/newest-checkpoint"))) == 2
