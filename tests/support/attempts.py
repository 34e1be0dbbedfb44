"""Runs that are killed and restarted, and comparisons of two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.harness import launch

SMALL = (
    "rollout.prompts_per_step=10", "actor.minibatch_sequences=40", "critic.minibatch_sequences=40",
    "evaluation.every_steps=4", "logging.tensorboard=false", "actor.epochs=1", "critic.epochs=1",
)  # fmt: skip


def attempts(folder: Path, *planned: dict[str, Any], timeout: float = 200) -> str:
    """Run killed_runs.py and return the output of all attempts."""
    plan = folder / "attempts.json"
    plan.write_text(json.dumps(planned))
    return launch("killed_runs.py", 0, plan, timeout_seconds=timeout)


def train(
    directory: Path, *overrides: str, config: str = "quickstart", processes: int = 2, expect: str = "0", **more: Any
) -> dict[str, Any]:
    """Return an attempt to train with a shipped configuration."""
    arguments = ["train", f"configs/{config}.yaml", f"run.directory={directory}", *SMALL, *overrides]
    return {"arguments": arguments, "processes": processes, "expect": expect, **more}


def killed_at(
    directory: Path, step: int, at: str, rank: int, *overrides: str, after_checkpoint: int = 0, **more: Any
) -> dict[str, Any]:
    """Return an attempt that ends by SIGKILL. If `after_checkpoint` is above 0, the kill waits for the checkpoint of
    this step."""
    kill: dict[str, Any] = {"step": step, "at": at, "rank": rank}
    if after_checkpoint:
        kill["after_checkpoint"] = after_checkpoint
    return train(directory, *overrides, expect="killed", kill=kill, **more)


def timeless(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without times, rates and memory."""
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
    """Check that metrics, samples, final weights, optimizers and random states are bitwise equal."""
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
