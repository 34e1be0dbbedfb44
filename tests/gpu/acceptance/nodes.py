"""The steps of `launch/slurm/acceptance.sbatch`: what each starts on all ranks of the job, and what is held against it.

Each is a job step of its own, so that one that fails or hangs ends alone.
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
"""Mean difference of the engine's and the trainer's log-probabilities that is the arithmetic's, by its type."""
_STEPS = 6
_LEARNING_STEPS = 50
_SHORT = ("evaluation=null", "run.export_final_model=false", "logging.tensorboard=false")
_KILLED_AFTER = 2


@dataclass(frozen=True)
class NodeStep:
    """A job step."""

    name: str
    minutes: int
    """It is ended after so many."""
    program: str
    """The Python module that every rank runs."""
    words: tuple[str, ...]
    proves: str
    place: str = "all"
    """`all`: every node has ranks. `engines`: SGLang on the last node, ranks on the others. `kill`: every node, and all
    ranks are killed when so many steps were logged as `_KILLED_AFTER` says. Otherwise why it is skipped."""


@dataclass(frozen=True)
class Shape:
    """Of a job."""

    nodes: int
    ranks_per_node: int
    logs: Path


def steps(shape: Shape, given: Sequence[str]) -> list[NodeStep]:
    """In their order; `given` is a configuration with overrides, as `megappo train` takes them."""
    ranks, whole = shape.ranks_per_node, ("train", *given, *_SHORT)

    def train(name: str, *words: str, of: str = "", count: int = _STEPS) -> tuple[str, ...]:
        return (*whole, f"run.steps={count}", f"run.directory={shape.logs / (of or name)}", *words)

    alone = "one node has no other" if shape.nodes == 1 else ""
    single = "a node has one rank, so an engine has one" if ranks == 1 else ""
    every, killed = "checkpoint.every_steps=1", ("kill", "killed-run")
    return [
        NodeStep("links", 3, "megappo", ("doctor", *given), "software, GPUs, links and clocks of all ranks"),
        NodeStep(LAYOUTS, 4, "tests.gpu.node_acceptance", ("layouts", "--out", str(shape.logs)),
                 "a PPO step of TP, PP, EP and DP against the oracle"),
        NodeStep("engine", 4, "megappo", train("engine", every),
                 "sleep, train, wake, weights to engines of one rank on the same devices"),
        NodeStep("engine-tp", 4, "megappo", train("engine-tp", f"rollout.sglang.tensor_parallel={ranks}"),
                 "the same with one engine over the ranks of a node", single or "all"),
        NodeStep("broadcast", 4, "megappo", train("broadcast"), "weights over the network to engines on another node",
                 alone or "engines"),
        NodeStep("kill", 4, "megappo", train("kill", every, of=killed[1]), "a run that is killed by SIGKILL", "kill"),
        NodeStep("resume", 4, "megappo", train("resume", every, of=killed[1]), "and goes on as if it had not been"),
        NodeStep("learning", 15, "megappo", train("learning", count=_LEARNING_STEPS), "the score rises; MFU"),
    ]  # fmt: skip


def lines(todo: Sequence[NodeStep]) -> str:
    """For the batch script: a line each, fields separated by tabs. Raises ValueError for words that hold such."""
    for word in (word for step in todo for word in step.words):
        if not word or not word.isprintable():
            raise ValueError(f"{word!r} is empty or holds a tab or a line break, which a word here cannot")
    fields = ([s.name, str(s.minutes), s.place, s.program, *s.words] for s in todo)
    return "\n".join("\t".join(f) for f in fields)


def rows(step: NodeStep, shape: Shape, code: int) -> Iterator[Row]:
    """What a step that ended with `code` has shown."""
    if step.place not in ("all", "engines", "kill"):
        yield skipped("the step", step.place)
    elif step.name == "kill":
        count = len(_metrics(shape.logs / "killed-run"))
        yield judged("killed", code != 0 and _KILLED_AFTER <= count < _STEPS, f"after {count} of {_STEPS} steps")
    elif code != 0:
        yield failed("the step", f"a rank ended with {code}; the first one's last words: {_last_words(shape, step)}")
    elif step.name == LAYOUTS:
        yield from (Row.of(row) for row in json.loads((shape.logs / f"{LAYOUTS}.json").read_text()))
    else:
        yield from _JUDGES.get(step.name, _of_a_run)(shape.logs / step.name)


def _last_words(shape: Shape, step: NodeStep) -> str:
    """Of the first rank that has said anything."""
    logs = (shape.logs / step.name / f"rank-{rank}.log" for rank in range(shape.nodes * shape.ranks_per_node))
    said = (log.read_text(errors="replace") for log in logs if log.exists())
    return " / ".join(next(filter(None, said), "none").split("\n")[-4:])[:300]


def _metrics(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _links(folder: Path) -> Iterator[Row]:
    """The doctor has found nothing broken, or it would have ended otherwise."""
    found = [line for line in (folder / "rank-0.log").read_text().splitlines() if line.startswith("slow ")]
    yield judged("doctor", True, "nothing broken" + "".join(f"; {' '.join(line.split())}" for line in found))


def _of_a_run(directory: Path) -> Iterator[Row]:
    """Every sync with servers has compared fingerprints, or it would have ended; what they say of themselves, the
    embedded engine does not."""
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
    import torch  # which the other rows need not wait for

    return torch.cuda.is_available()


def _resumed(folder: Path) -> Iterator[Row]:
    """Beside the run that was not killed."""
    ours, theirs = (logged(folder.parent / name) for name in ("engine", "killed-run"))
    gap = largest_gap(ours, theirs)
    words = "equal to the last bit" if ours == theirs else f"differ by {gap:.1e}"
    holds = gap <= GAP if _on_cuda() else ours == theirs
    yield judged("metrics of all steps, killed and continued", holds, words, gap=gap)


def _learning(directory: Path) -> Iterator[Row]:
    found = _metrics(directory)
    scores, fifth = [line["reward/mean"] for line in found], _LEARNING_STEPS // 5
    first, last = (sum(part) / fifth for part in (scores[:fifth], scores[-fifth:]))
    yield judged(f"score over {len(scores)} steps", last > first and len(scores) == _LEARNING_STEPS,
                 f"{first:.3f} in the first fifth, {last:.3f} in the last", first=first, last=last)  # fmt: skip
    yield from _speed(found[-1])


_JUDGES: dict[str, Callable[[Path], Iterator[Row]]] = {"links": _links, "resume": _resumed, "learning": _learning}
