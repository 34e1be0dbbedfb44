"""The steps of `launch/slurm/acceptance.sbatch`: their commands on all ranks of the job, and checks of their results.

Each step is a separate job step, so a failure or a hang does not affect the other steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.config import load_config
from tests.gpu.acceptance.resume import GAP, largest_gap, logged
from tests.gpu.acceptance.table import Row, failed, judged, measured, skipped, within

LAYOUTS = "layouts"
NATS = {"float32": 1e-3, "bfloat16": 0.1}
"""Bounds of the mean difference of log-probabilities of engine and trainer by dtype. Smaller differences are rounding
errors."""
_STEPS = 6
_LEARNING_STEPS = 50
_SHORT = ("evaluation=null", "run.export_final_model=false", "logging.tensorboard=false")
_KILLED_AFTER = 2


@dataclass(frozen=True)
class NodeStep:
    """A step of the job."""

    name: str
    minutes: int
    """Time limit of the step."""
    program: str
    """Python module for every rank."""
    arguments: tuple[str, ...]
    proves: str
    place: str = "all"
    """`all`: every node has ranks. `engines`: SGLang on the last node, ranks on the others. `kill`: ranks on every
    node, which are killed after `_KILLED_AFTER` logged steps. Any other text is the reason for a skip."""


@dataclass(frozen=True)
class Shape:
    """Shape of a job."""

    nodes: int
    ranks_per_node: int
    logs: Path


def steps(shape: Shape, configuration: Sequence[str]) -> list[NodeStep]:
    """Return the steps in order. `configuration` is a configuration with overrides, as for `megappo train`."""
    ranks, whole = shape.ranks_per_node, ("train", *configuration, *_SHORT)

    def train(name: str, *arguments: str, of: str = "", count: int = _STEPS) -> tuple[str, ...]:
        return (*whole, f"run.steps={count}", f"run.directory={shape.logs / (of or name)}", *arguments)

    alone = "needs a second node" if shape.nodes == 1 else ""
    single = "needs several ranks per node" if ranks == 1 else ""
    every, killed = "checkpoint.every_steps=1", ("kill", "killed-run")
    return [
        NodeStep("links", 3, "megappo", ("doctor", *configuration), "software, GPUs, links and clocks of all ranks"),
        NodeStep(LAYOUTS, 4, "tests.gpu.node_acceptance", ("layouts", "--out", str(shape.logs)),
                 "a PPO step of TP, PP, EP and DP against the oracle"),
        NodeStep("engine", 4, "megappo", train("engine", every),
                 "sleep, train, wake, and weights for engines of one rank on the same devices"),
        NodeStep("engine-tp", 4, "megappo", train("engine-tp", f"rollout.servers.tensor_parallel={ranks}"),
                 "the same with one engine per node", single or "all"),
        NodeStep("broadcast", 4, "megappo", train("broadcast"), "weights over the network to engines on another node",
                 alone or "engines"),
        NodeStep("kill", 4, "megappo", train("kill", every, of=killed[1]), "a run that is killed by SIGKILL", "kill"),
        NodeStep("resume", 4, "megappo", train("resume", every, of=killed[1]), "continues exactly"),
        NodeStep("learning", 15, "megappo", train("learning", count=_LEARNING_STEPS), "the score rises; MFU"),
    ]  # fmt: skip


def lines(todo: Sequence[NodeStep]) -> str:
    """Return the lines for the batch script, with fields separated by tabs. Raises ValueError for arguments with tabs
    or line breaks."""
    for word in (word for step in todo for word in step.arguments):
        if not word or not word.isprintable():
            raise ValueError(f"argument {word!r} is empty or contains a tab or a line break; remove this argument")
    fields = ([s.name, str(s.minutes), s.place, s.program, *s.arguments] for s in todo)
    return "\n".join("\t".join(f) for f in fields)


def rows(step: NodeStep, shape: Shape, code: int) -> Iterator[Row]:
    """Yield the rows of a step that ended with `code`."""
    if step.place not in ("all", "engines", "kill"):
        yield skipped("the step", step.place)
    elif step.name == "kill":
        count = len(_metrics(shape.logs / "killed-run"))
        yield judged("killed", code != 0 and _KILLED_AFTER <= count < _STEPS, f"after {count} of {_STEPS} steps")
    elif code != 0:
        yield failed(
            "the step", f"a rank ended with {code}; the last lines of the first log: {_last_lines(shape, step)}"
        )
    elif step.name == LAYOUTS:
        yield from (Row.of(row) for row in json.loads((shape.logs / f"{LAYOUTS}.json").read_text()))
    else:
        yield from _JUDGES.get(step.name, _of_a_run)(shape.logs / step.name)


def _last_lines(shape: Shape, step: NodeStep) -> str:
    """Return the last lines of the first rank with output."""
    logs = (shape.logs / step.name / f"rank-{rank}.log" for rank in range(shape.nodes * shape.ranks_per_node))
    texts = (log.read_text(errors="replace") for log in logs if log.exists())
    return " / ".join(next(filter(None, texts), "none").split("\n")[-4:])[:300]


def _metrics(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _links(folder: Path) -> Iterator[Row]:
    """Yield the slow findings of the doctor. A broken finding would end the doctor with an error code."""
    slow = [line for line in (folder / "rank-0.log").read_text().splitlines() if line.startswith("slow ")]
    yield judged("doctor", True, "nothing broken" + "".join(f"; {' '.join(line.split())}" for line in slow))


def _of_a_run(directory: Path) -> Iterator[Row]:
    """Check a run. Every sync with servers has compared fingerprints, otherwise the run would have failed. Some
    metrics exist only with servers."""
    logged_steps = _metrics(directory)
    yield judged("steps", len(logged_steps) == _STEPS, f"{len(logged_steps)} of {_STEPS}")
    last = logged_steps[-1]
    seconds, rate = last["sync/seconds"], last["sync/gigabytes_per_second"]
    yield measured("sync", f"{seconds:.3g} s, {rate:.3g} GB/s", seconds=seconds, gigabytes_per_second=rate)
    gaps = {"rollout, mean": max(line["mismatch/mean"] for line in logged_steps)}
    if "sync/probe_gap" in last:
        gaps["probe"] = max(line["sync/probe_gap"] for line in logged_steps)
    yield within("engine beside trainer, nats", gaps, NATS[load_config(directory / "config.yaml").model.dtype])
    if "engine/restarts" in last:
        yield judged("restarts", not last["engine/restarts"], f"{last['engine/restarts']:g} servers")
    yield from _speed(last)


def _speed(last: dict[str, Any]) -> Iterator[Row]:
    share = f", MFU {last['mfu']:.1%}" if "mfu" in last else ""
    rate = last["tokens_per_second"]
    yield measured("the last step", f"{last['time/step']:.3g} s, {rate:.0f} tokens/s{share}", tokens_per_second=rate)


def _on_cuda() -> bool:
    import torch  # the other rows do not need this import

    return torch.cuda.is_available()


def _resumed(folder: Path) -> Iterator[Row]:
    """Compare the run with the run that was not killed."""
    ours, theirs = (logged(folder.parent / name) for name in ("engine", "killed-run"))
    gap = largest_gap(ours, theirs)
    text = "equal to the last bit" if ours == theirs else f"differ by {gap:.1e}"
    is_equal = gap <= GAP if _on_cuda() else ours == theirs
    yield judged("metrics of all steps, killed and continued", is_equal, text, gap=gap)


def _learning(directory: Path) -> Iterator[Row]:
    slow = _metrics(directory)
    scores, fifth = [line["reward/mean"] for line in slow], _LEARNING_STEPS // 5
    first, last = (sum(part) / fifth for part in (scores[:fifth], scores[-fifth:]))
    yield judged(f"score over {len(scores)} steps", last > first and len(scores) == _LEARNING_STEPS,
                 f"{first:.3f} in the first fifth, {last:.3f} in the last", first=first, last=last)  # fmt: skip
    yield from _speed(slow[-1])


_JUDGES: dict[str, Callable[[Path], Iterator[Row]]] = {"links": _links, "resume": _resumed, "learning": _learning}
