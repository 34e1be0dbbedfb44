"""Runs that are killed and started again, and what makes two of them the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.harness import launch

SMALL = (
    "rollout.prompts_per_step=10", "actor.minibatch_sequences=40", "critic.minibatch_sequences=40",
    "evaluation.every_steps=4", "logging.tensorboard=false", "actor.epochs=1", "critic.epochs=1",
)  # fmt: skip


def attempts(folder: Path, *wanted: dict[str, Any], timeout: float = 200) -> str:
    """Run killed_runs.py; returns what all attempts printed."""
    plan = folder / "attempts.json"
    plan.write_text(json.dumps(wanted))
    return launch("killed_runs.py", 0, plan, timeout_seconds=timeout)


def train(
    directory: Path,
    *overrides: str,
    config: str = "quickstart",
    processes: int = 2,
    expect: str = "0",
    **more: Any,
) -> dict[str, Any]:
    """An attempt at a shipped configuration."""
    arguments = ["train", f"configs/{config}.yaml", f"run.directory={directory}", *SMALL, *overrides]
    return {"arguments": arguments, "processes": processes, "expect": expect, **more}


def killed_at(
    directory: Path, step: int, at: str, rank: int, *overrides: str, after_checkpoint: int = 0, **more: Any
) -> dict[str, Any]:
    """An attempt that ends by SIGKILL, once the checkpoint of step `after_checkpoint` is written, if it is above 0."""
    kill: dict[str, Any] = {"step": step, "at": at, "rank": rank}
    if after_checkpoint:
        kill["after_checkpoint"] = after_checkpoint
    return train(directory, *overrides, expect="killed", kill=kill, **more)


def timeless(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times, rates and memory."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("time/", "memory/")) and "second" not in name
        }
        for line in lines
    ]


def assert_same_run(undisturbed: Path, disturbed: Path, step: int) -> None:
    """Metrics, samples, final weights, optimizers and random states, to the last bit."""
    assert timeless(undisturbed / "metrics.jsonl") == timeless(disturbed / "metrics.jsonl")
    last = undisturbed / "checkpoints" / f"step-{step:06d}"
    written = {p.relative_to(undisturbed) for p in (*last.glob("*.distcp"), *last.glob("*-0000?.pt"))}
    assert len(written) >= 4
    for name in (*map(Path, ("samples.jsonl", "jumps.jsonl", "final/model.safetensors")), *written):
        assert (undisturbed / name).read_bytes() == (disturbed / name).read_bytes(), name
    trainers = [
        json.loads((run / last.relative_to(undisturbed) / "checkpoint.json").read_text())["body"]["content"]
        for run in (undisturbed, disturbed)
    ]
    assert trainers[0]["trainer"] == trainers[1]["trainer"]
    assert trainers[0]["updates"] == trainers[1]["updates"]
