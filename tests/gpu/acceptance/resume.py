"""A run that is killed and restarted, compared with an uninterrupted run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megappo.cli import main
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, judged, measured
from tests.support.places import ROOT

STEPS = 3
KILLED_AFTER = 1
"""The run is killed after the checkpoint of this step."""
_LONGEST_SECONDS = 100.0
_TIMES = ("time/", "memory/")
GAP = 1e-2
"""Bound of relative differences of a resumed run on a GPU, where some sums have no fixed order."""


def arguments(place: Place, directory: Path) -> list[str]:
    """Return the arguments of the quickstart on one process."""
    overrides = ["actor.layout={}", "critic.layout={}", "rollout.prompts_per_step=10", "actor.minibatch_sequences=40",
             "critic.minibatch_sequences=40", "evaluation=null", "data.validation=null", "logging.tensorboard=false",
             "run.export_final_model=false", f"run.steps={STEPS}", "checkpoint.every_steps=1",
             f"runtime.device={place.device}", f"run.directory={directory}"]  # fmt: skip
    return [
        "train",
        str(ROOT / "configs/quickstart.yaml"),
        f"model.path={ROOT / 'configs/models/tiny_arithmetic'}",
        *overrides,
    ]


def killed_and_continued(place: Place) -> Iterator[Row]:
    """Kill a run by SIGKILL, continue the run, and compare all logged metrics."""
    whole, killed = Path(place.scratch) / "whole", Path(place.scratch) / "killed"
    train(arguments(place, whole))
    step = kill(arguments(place, killed), killed)
    yield measured("killed", f"by SIGKILL, with a checkpoint of step {step}", step=step)
    train(arguments(place, killed))
    ours, theirs = logged(whole), logged(killed)
    same = ours == theirs
    gap = largest_gap(ours, theirs)
    what = "metrics of all steps, killed and continued"
    if place.device == "cpu":
        yield judged(what, same, "equal to the last bit" if same else f"differ by {gap:.1e}", gap=gap)
    else:
        yield judged(
            what, gap <= GAP, "equal to the last bit" if same else f"differ by {gap:.1e}, bound {GAP:g}", gap=gap
        )


def train(command_arguments: list[str]) -> None:
    """Run in this process. Raises RuntimeError if the run fails."""
    code = main(command_arguments)
    if code:
        raise RuntimeError(f"megappo train ended with {code}")


def kill(command_arguments: list[str], directory: Path, most_seconds: float = _LONGEST_SECONDS) -> int:
    """Run in a separate process until its checkpoint is written, then kill the process. Return the newest step with a
    checkpoint."""
    process = subprocess.Popen([sys.executable, "-m", "megappo", *command_arguments], cwd=ROOT, env=own_variables())
    end = time.monotonic() + most_seconds
    try:
        while not (directory / f"checkpoints/step-{KILLED_AFTER:06d}/checkpoint.json").exists():
            if process.poll() is not None:
                raise RuntimeError(f"the run ended with {process.returncode} before it could be killed")
            if time.monotonic() > end:
                raise RuntimeError(f"no checkpoint of step {KILLED_AFTER} within {most_seconds:g} s")
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return max(int(p.parent.name.removeprefix("step-")) for p in directory.glob("checkpoints/step-*/checkpoint.json"))


def own_variables() -> dict[str, str]:
    """Return the environment variables without those of a process group that this process has left."""
    left = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in left}


def logged(directory: Path) -> list[dict[str, Any]]:
    """Return metrics.jsonl without times, rates and memory."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{n: v for n, v in line.items() if not n.startswith(_TIMES) and "second" not in n} for line in lines]


def largest_gap(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Return the largest difference relative to the larger absolute value, or to 1 if this is larger. The result is
    infinite if the metric names differ."""
    if [line.keys() for line in ours] != [line.keys() for line in theirs]:
        return float("inf")
    pairs = ((a[n], b[n]) for a, b in zip(ours, theirs, strict=True) for n in a if a[n] != b[n])
    return max((abs(x - y) / max(abs(x), abs(y), 1.0) for x, y in pairs), default=0.0)
