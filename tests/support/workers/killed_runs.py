"""Run the command line several times on separate processes, some of which kill themselves during the run.

Usage: killed_runs.py ATTEMPTS.json, a list of {"arguments", "processes", "kill", "expect"}.
- `kill` is absent or {"rank", "step", "at"}. At this step, the rank sends itself SIGKILL or another `signal`. If
  `signal` is null, the rank sleeps without end. With `remove`, the rank deletes the run directory and continues. The
  place `at` is the start of a stage, the second minibatch of `update_critic` or `update_actor`, before or after the
  marker of a checkpoint is written, or a token (see `stall`).
- `stall` in `kill` is a stage of this step in which every rank needs half a second per token of the embedded engine.
  The rank with `at: token` receives its signal at the fifth token. Each rank receives only one answer of SGLang.
- `after_answers` in `kill` delays the signal until all ranks have these answers. `after_checkpoint` delays the signal
  until the checkpoint of that step exists.
- `full`: {"rank", "step", "times"}. The disk is full for the part of this rank of the checkpoint, `times` times.
- `ctrl_c`: all ranks receive SIGINT as from torchrun after step 1 is logged, and a second time one second later.
- `rewrite`: the newest checkpoint is loaded and written again in the layout of the arguments, without training.
The program prints the output of the attempts. It fails if an attempt does not end as expected ("killed" or an exit
code).
"""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from transformers import LogitsProcessorList

from megappo.checkpoint import files
from megappo.cli import main
from megappo.config import derive_run, load_config
from megappo.errors import USER_ERROR
from megappo.megatron.placed import PlacedBatch
from megappo.network.store import free_port
from megappo.ppo.assembly.components import assemble
from megappo.ppo.assembly.start import choose_start
from megappo.ppo.records.checkpoints import Boundary, Checkpoints
from megappo.ppo.reports.reporting import Reporter
from megappo.runtime.process import start_runtime
from megappo.runtime.waiting import wait_until
from megappo.runtime.watch.interrupts import Interrupts


def make_end(
    name: str | None, removed: Path | None, awaited: list[Event], checkpoint: Path | None
) -> Callable[[], None]:
    """Return a function that waits for events and a checkpoint, and then sends this process a signal, sleeps without
    end or deletes a folder. After a signal, the function returns when the thread of `Interrupts` has received the
    signal."""

    def die() -> None:
        for event in awaited:
            assert event.wait(120), "a rank has no answer"
        if checkpoint is not None:
            marker = checkpoint / files.MARKER
            assert wait_until(marker.exists, 120, every_seconds=0.01), f"{checkpoint} is not written"
        if removed is not None:
            shutil.rmtree(removed)
        elif name is None:
            time.sleep(10**6)
        else:
            os.kill(os.getpid(), signal.Signals[name])
            is_received = wait_until(lambda: any(one.requested for one in listening), 120, every_seconds=0.01)
            assert is_received, f"the thread of Interrupts has not received {name}"

    listening, start = list[Interrupts](), Interrupts.start

    def note(self: Interrupts) -> None:
        start(self)
        listening.append(self)

    Interrupts.start = note  # type: ignore[method-assign]
    return die


def arm(step: int, at: str, die: Callable[[], None]) -> None:
    """Call `die` at a place of a step."""
    state: dict[str, Any] = {"step": 0, "stage": "", "updates": 0}
    begin, stage, update = Reporter.begin_step, Reporter.stage, PlacedBatch.update

    def begin_step(self: Reporter, number: int) -> None:
        state.update(step=number, updates=0)
        begin(self, number)

    def enter(self: Reporter, name: str, waits_for: str = "") -> Any:
        state.update(stage=name, updates=0)
        begun = stage(self, name, waits_for)
        if (state["step"], name) == (step, at) and not at.startswith("update"):
            die()
        return begun

    def update_minibatch(self: PlacedBatch, *args: Any, **kwargs: Any) -> Any:
        state["updates"] += 1
        if (state["step"], state["stage"]) == (step, at) and state["updates"] == 2:
            die()
        return update(self, *args, **kwargs)

    Reporter.begin_step, Reporter.stage = begin_step, enter  # type: ignore[method-assign, assignment]
    PlacedBatch.update = update_minibatch  # type: ignore[method-assign]
    _arm_checkpoint(step, at, die)


def stall(step: int, stage: str, at_token: Callable[[], None], answered: Event) -> None:
    """Slow down generation in a stage of a step. `answered` is set by the one answer of a server."""
    state: dict[str, Any] = {"step": 0, "stage": "", "tokens": 0, "asked": 0}
    begin, enter, sample = Reporter.begin_step, Reporter.stage, LogitsProcessorList.__call__

    def begin_step(self: Reporter, number: int) -> None:
        state.update(step=number)
        begin(self, number)

    def enter_stage(self: Reporter, name: str, waits_for: str = "") -> Any:
        if state["tokens"]:
            print(f"tokens in the stalled stage: {state['tokens']}", flush=True)
        state.update(stage=name, tokens=0)
        return enter(self, name, waits_for)

    def sample_slowly(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (state["step"], state["stage"]) == (step, stage):
            state["tokens"] += 1
            time.sleep(0.5)
            if state["tokens"] == 5:
                at_token()
        return sample(self, *args, **kwargs)

    Reporter.begin_step, Reporter.stage = begin_step, enter_stage  # type: ignore[method-assign, assignment]
    LogitsProcessorList.__call__ = sample_slowly
    if importlib.util.find_spec("sglang") is not None:
        _stall_servers(step, state, answered)


def _stall_servers(step: int, state: dict[str, Any], answered: Event) -> None:
    """Answer only one request of a rank to servers in this step. Probes are not counted."""
    from aiohttp import ClientSession

    post = ClientSession.post

    @asynccontextmanager
    async def post_in_vain(self: ClientSession, url: str, **options: Any) -> AsyncIterator[Any]:
        body = options["json"]
        sampling = body.get("sampling_params", [{"top_k": 1}])[0]
        greedy = sampling["top_k"] == 1 or sampling["top_p"] < 1
        samples = state["step"] == step and not greedy
        if samples:
            state["asked"] += 1
            await asyncio.sleep(10**6 if state["asked"] > 1 else 0)
        async with post(self, url, **options) as answer:
            yield answer
        if samples:
            answered.set()

    ClientSession.post = post_in_vain


def _arm_checkpoint(step: int, at: str, die: Callable[[], None]) -> None:
    save, mark = dcp.save, files.write_marker

    def save_shards(state: Any, *, storage_writer: Any, **kwargs: Any) -> Any:
        metadata = save(state, storage_writer=storage_writer, **kwargs)
        name = Path(storage_writer.path).name
        if (name.removesuffix(".new"), at) == (files.step_folder(Path(), step).name, "shards_written"):
            die()
        return metadata

    def write_marker(folder: Path, marker: Any) -> None:
        if (marker.step, at) == (step, "before_marker"):
            die()
        mark(folder, marker)
        if (marker.step, at) == (step, "after_marker"):
            die()

    dcp.save = save_shards
    files.write_marker = write_marker


def fill_disk(step: int, times: int) -> None:
    """Raise the error of a full disk for the part of a checkpoint on this rank."""
    write, failures = dcp.FileSystemWriter.write_data, list[int]()

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        if len(failures) < times and Path(self.path).name.removesuffix(".new") == files.step_folder(Path(), step).name:
            failures.append(step)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, plan, planner)

    dcp.FileSystemWriter.write_data = write_data  # type: ignore[method-assign]


def rewrite(arguments: list[str]) -> int:
    """Load the newest checkpoint and write it again."""
    config = load_config(arguments[0], arguments[1:])
    with start_runtime(config.runtime) as runtime:
        derived = derive_run(config, runtime.world_size)
        start = choose_start(config, derived, runtime)
        parts = assemble(config, derived, runtime)
        resumed = Checkpoints(parts, start).resumed
        assert resumed is not None
        # Only checkpoints without a loaded checkpoint write the same step again.
        Checkpoints(parts, replace(start, checkpoint=None)).save(Boundary(resumed.load(), {}, {}), wait=True)
        parts.close()
    return 0


def rank_main(rank: int, port: int, attempt: dict[str, Any], answered: list[Event]) -> None:
    """Run one rank of an attempt."""
    processes = len(answered)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    full = attempt.get("full")
    if full is not None and full["rank"] == rank:
        fill_disk(full["step"], full["times"])
    kill = attempt.get("kill")
    if kill is not None:
        removed = run_directory(attempt["arguments"]) if kill.get("remove") else None
        await_answers = answered if kill.get("after_answers") else []
        checkpoint = None
        if "after_checkpoint" in kill:
            folder = run_directory(attempt["arguments"]) / "checkpoints"
            checkpoint = files.step_folder(folder, kill["after_checkpoint"])
        ends = make_end(kill.get("signal", "SIGKILL"), removed, await_answers, checkpoint)
        die = ends if kill["rank"] == rank else lambda: None
        arm(kill["step"], kill["at"], die)
        if "stall" in kill:
            stall(kill["step"], kill["stall"], die, answered[rank])
    sys.exit(rewrite(attempt["arguments"]) if attempt.get("rewrite") else main(attempt["arguments"]))


def run_directory(arguments: list[str]) -> Path:
    """Return the run directory of an attempt."""
    return Path(next(a.partition("=")[2] for a in arguments if a.startswith("run.directory=")))


def press_ctrl_c_twice(ranks: list[Any], arguments: list[str]) -> None:
    """Send SIGINT as two presses of Ctrl-C. The first press reaches a worker twice, from the terminal and from
    torchrun."""
    metrics = run_directory(arguments) / "metrics.jsonl"
    while not metrics.exists() or '"step": 1,' not in metrics.read_text():
        time.sleep(0.05)
    for pause in (0.5, 0.1, 1.5):
        time.sleep(pause)
        assert all(p.is_alive() for p in ranks), "ended too early"
        for process in ranks:
            os.kill(process.pid, signal.SIGINT)


def run(attempt: dict[str, Any]) -> str:
    """Run all ranks of an attempt. Return "killed" or the first exit code other than 0."""
    context = multiprocessing.get_context("fork")
    port, n = free_port("127.0.0.1"), attempt["processes"]
    answered = [context.Event() for _ in range(n)]
    ranks = [context.Process(target=rank_main, args=(r, port, attempt, answered)) for r in range(n)]
    for process in ranks:
        process.start()
    if attempt.get("ctrl_c"):
        press_ctrl_c_twice(ranks, attempt["arguments"])
    while any(p.is_alive() for p in ranks) and not any(p.exitcode for p in ranks):
        time.sleep(0.05)
    failed = [p.exitcode for p in ranks if p.exitcode]
    if failed and -signal.SIGKILL not in failed and failed[0] != USER_ERROR:
        for process in ranks:
            process.join(
                20
            )  # all ranks end with the same error; for wrong settings, one rank is enough to end all ranks
    for process in ranks:
        process.kill()
        process.join()
    return "killed" if -signal.SIGKILL in failed else str(failed[0] if failed else 0)


if __name__ == "__main__":
    for number, attempt in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        start = time.monotonic()
        outcome = run(attempt)
        print(f"attempt {number}: {outcome} after {time.monotonic() - start:.1f} s: {attempt.get('kill')}", flush=True)
        if outcome != attempt["expect"]:
            sys.exit(f"attempt {number} ended with {outcome} instead of {attempt['expect']}: {attempt}")
