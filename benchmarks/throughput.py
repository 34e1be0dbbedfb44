#!/usr/bin/env python3
"""How fast is a PPO step on a CPU? Measures every published claim, one after the other, and writes the page of results.

Usage: python -m benchmarks.throughput --model FOLDER --out FOLDER [--only NAME ...] [--list]

Measures SmolLM2-135M-Instruct, whose folder `--model` is, with the other programs of this folder, in order of
importance: about two and a half hours on two cores on which nothing else runs, and 20 GB of memory. What lies in
`--out` is not measured again, so it may be stopped and goes on. Then it writes `smollm2-step.md` there, and pictures
where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = str(ROOT / "configs" / "smollm2_arithmetic.yaml")
ALONE = ("actor.layout={}", "critic.layout={}")
SHARED = ("actor.optimizer.distributed=true", "critic.optimizer.distributed=true")
REFERENCE = ("reference={}", "algorithm.kl_in_reward={kind: kl, coef: 0.05}")
MICROBATCHES = tuple(f"{role}.microbatch_budget_tokens=1280" for role in ("actor", "critic"))
STEP = (
    "rollout.prompts_per_step=32", "rollout.max_response_tokens=64", "rollout.generate_batch_sequences=32",
    *(f"{role}.{x}" for role in ("actor", "critic") for x in ("epochs=2", "minibatch_sequences=16")), *MICROBATCHES,
    *REFERENCE,
)  # fmt: skip
HALF = ("rollout.prompts_per_step=16", "actor.minibatch_sequences=8", "critic.minibatch_sequences=8")
EIGHT_LAYERS = "SmolLM2-8-layers"
_THREADS = ("--threads", "2")


@dataclass(frozen=True)
class Measurement:
    """A command, and the file that it leaves."""

    name: str
    minutes: int
    program: str
    arguments: tuple[str, ...]
    ranks: int = 1
    is_small: bool = False
    """Whether the model has only eight layers, so that four processes fit."""

    def command(self, model: Path, out: Path) -> list[str]:
        """Command line of the measurement."""
        launch = [sys.executable]
        if self.ranks > 1:
            launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        folder = eight_layers(model, out) if self.is_small else model
        words = ["-m", f"benchmarks.{self.program}", CONFIG, f"model.path={folder}", *self.arguments]
        return [*launch, *words, "--json", str(out / f"{self.name}.json")]


def _beside_trl(
    name: str, lengths: str, ranks: int, repeat: int, microbatch: int, *more: str, minutes: int = 9
) -> Measurement:
    options = (
        "--ranks",
        str(ranks),
        "--lengths",
        lengths,
        "--repeat",
        str(repeat),
        "--trl-microbatch",
        str(microbatch),
    )
    of_ranks = SHARED if ranks > 1 else ()
    return Measurement(name, minutes, "trl", (*MICROBATCHES, *of_ranks, *_THREADS, *options, *more))


def _update(name: str, ranks: int, *arguments: str) -> Measurement:
    sizes = ("--samples", "16", "--prompt", "43", *_THREADS, "--repeat", "7")
    return Measurement(name, 4, "update", (*MICROBATCHES, *sizes, *arguments), ranks)


def _scaling(name: str, minutes: int, *arguments: str) -> Measurement:
    turns = ("--worlds", "1", "2", "4", "--rounds", "2", "--repeat", "2")
    return Measurement(name, minutes, "scaling", (*ALONE, *STEP, *HALF, *turns, *arguments), is_small=True)


MEASUREMENTS = (
    _update("update", 1, *ALONE, "--responses", "30"),
    _update("update-even", 1, *ALONE, "--responses", "1-64"),
    _update("update-dp2", 2, *ALONE, "--responses", "30"),
    _update("update-pp2", 2, "--responses", "30"),
    _beside_trl("trl-full", "full:64", 1, 5, 8),
    _beside_trl("trl-even", "even:1-64", 1, 5, 8),
    _beside_trl("trl-tail", "tail:32-256", 1, 5, 4, minutes=42),
    Measurement("step-dp2", 5, "step", (*ALONE, *STEP, "runtime.threads_per_rank=1", "--repeat", "5"), 2),
    Measurement("overhead", 2, "overhead", ("rollout.max_response_tokens=64", *REFERENCE, "--repeat", "5")),
    Measurement(
        "planned", 8, "planned",
        (*ALONE, *STEP, "--ranks", "1", *_THREADS, "--sizes", "16:32", "32:32", "32:64", "--repeat", "3"),
    ),
    _scaling("scaling", 8),
    Measurement("step-pp2", 5, "step", (*STEP, "runtime.threads_per_rank=1", "--repeat", "5"), 2),
    _beside_trl("trl-full-dp2", "full:64", 2, 5, 8),
    *(
        Measurement(
            f"curves-{seed}", 13, "trl",
            (*MICROBATCHES, *SHARED, "rollout.max_response_tokens=16", *_THREADS, "--ranks", "2", "--curves", "--seeds",
             str(seed), "--steps", "20", "--trl-microbatch", "8"),
        )
        for seed in (1, 2, 3)
    ),
    _scaling("scaling-pp", 5, "--axis", "pipeline", "--kinds", "strong"),
    _beside_trl("trl-bf16", "full:64", 1, 5, 8, "--precision", "bfloat16"),
    _beside_trl("trl-even-dp2", "even:1-64", 2, 5, 8),
)  # fmt: skip
JOINED = {
    "joined": ["trl-full", "trl-even", "trl-tail"],
    "joined-more": ["trl-full-dp2", "trl-even-dp2", "trl-bf16"],
    "joined-curves": ["curves-1", "curves-2", "curves-3"],
}
"""Several files of trl.py as one."""


def eight_layers(model: Path, out: Path) -> Path:
    """A folder of the model's shapes with eight layers and no weights."""
    folder = out / EIGHT_LAYERS
    if not folder.exists():
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin", ".*"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 8}, indent=2))
    return folder


def measure(measurement: Measurement, model: Path, out: Path) -> bool:
    """Run a measurement unless its file exists; returns whether the file exists afterwards."""
    file = out / f"{measurement.name}.json"
    if not file.exists():
        print(f"{measurement.name}: about {measurement.minutes} minutes", flush=True)
        of_drawn = ["model.init=random"] if measurement.is_small else []
        with (out / f"{measurement.name}.txt").open("w") as said:
            command = [*measurement.command(model, out), *of_drawn]
            done = subprocess.run(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            file.unlink(missing_ok=True)
            print(f"{measurement.name} failed with status {done.returncode}: {said.name} says why", flush=True)
    return file.exists()


def join(out: Path) -> None:
    """Join the results of several runs of trl.py into one file each."""
    for name, parts in JOINED.items():
        files = [str(out / f"{part}.json") for part in parts if (out / f"{part}.json").exists()]
        if files:
            command = [
                sys.executable,
                "-m",
                "benchmarks.trl",
                "--join",
                *files,
                "--json",
                str(out / f"{name}.json"),
            ]
            told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
            (out / f"{name}.txt").write_text(told)


def draw(out: Path) -> None:
    """Pictures, where matplotlib is installed."""
    drawn = ("joined", "joined-curves", *(m.name for m in MEASUREMENTS if m.program != "trl"))
    files = [str(out / f"{name}.json") for name in drawn if (out / f"{name}.json").exists()]
    if files and importlib.util.find_spec("matplotlib") is not None:
        subprocess.run([sys.executable, "-m", "benchmarks.plots", *files, "--out", str(out)], cwd=ROOT, check=True)


Found = Mapping[str, dict[str, Any]]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of Markdown."""
    yield ""
    yield from (f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
    yield ""


def beside_trl(found: Found) -> Iterator[str]:
    """Speed and memory beside TRL's, and what both learn."""
    rows = [row for name in ("joined", "joined-more") for row in found.get(name, {"rows": []})["rows"]]
    if rows:
        yield "## Beside TRL's experimental PPO"
        yield ""
        yield "32 prompts of 43 tokens a step, 2 epochs of 2 minibatches, two threads on each side, in turns."
        head = (
            "responses",
            "TRL in",
            "ranks",
            "TRL samples/s",
            "megappo samples/s",
            "times",
            "from",
            "to",
            "TRL GB",
            "GB",
        )
        yield from table(
            head,
            [
                (
                    r["profile"], r["precision"], str(r["ranks"]), f"{r['trl_samples_per_second']:.2f}",
                    f"{r['megappo_samples_per_second']:.2f}", f"{r['median_speed']:.2f}", f"{min(r['speeds']):.2f}",
                    f"{max(r['speeds']):.2f}", f"{r['trl_peak_bytes'] / 1e9:.1f}",
                    f"{r['megappo_peak_bytes'] / 1e9:.1f}",
                )
                for r in rows
            ],
        )  # fmt: skip


def updates(found: Found) -> Iterator[str]:
    """Updates beside the bare model."""
    rows = [
        (
            name, r["role"], f"{d['size']['shortest']} to {d['size']['longest']}",
            f"{statistics.median(r['update_seconds']):.2f}", f"{statistics.median(r['bare_seconds']):.2f}",
            f"{r['median_ratio']:.2f}", f"{min(r['ratios']):.2f}", f"{max(r['ratios']):.2f}",
            f"{r['median_cpu_ratio']:.2f}", r["form"],
        )
        for name, d in found.items() if name.startswith("update") for r in d["rows"]
    ]  # fmt: skip
    if rows:
        yield "## Updates beside the bare model"
        head = ("", "role", "tokens", "update s", "bare s", "ratio", "from", "to", "CPU ratio", "bare model")
        yield from table(head, rows)


def steps(found: Found) -> Iterator[str]:
    """Tables of a step's stages, and of its cost per sample outside of the models."""
    of_steps = {name: d for name, d in found.items() if name.startswith("step-")}
    if of_steps:
        names = [stage["stage"] for stage in next(iter(of_steps.values()))["stages"]]
        rows = [
            (name, *(f"{by.get(stage, 0.0):.2f}" for stage in names), f"{d['outside_share']:.1%}")
            for name, d in of_steps.items()
            for by in [{stage["stage"]: stage["median_seconds"] for stage in d["stages"]}]
        ]
        yield "## Where a step's time goes"
        yield from table(("seconds", *names, "outside"), rows)
    if "overhead" in found:
        yield "## What a sample costs beside generation and models"
        rows = [
            (
                f"{r['samples']:,}",
                f"{statistics.median(r['cpu_seconds']):.3f}",
                f"{1e3 * r['cpu_seconds_per_sample']:.3f}",
            )
            for r in found["overhead"]["rows"]
        ]
        yield from table(("samples", "CPU s of a step", "CPU ms of a sample"), rows)


def planned(found: Found) -> Iterator[str]:
    """The plan's seconds beside measured ones."""
    if "planned" in found:
        yield "## What the plan says"
        rows = [
            (r["words"], stage, f"{p:.2f}", f"{r['measured'][stage]:.2f}", f"{p / r['measured'][stage]:.2f}")
            for r in found["planned"]["rows"]
            for stage, p in r["planned"].items()
        ]
        yield from table(("a step of", "stage", "planned s", "measured s", "planned/measured"), rows)


def scaling(found: Found) -> Iterator[str]:
    """Table of the measurements with more processes."""
    rows = [
        (
            r["axis"], r["kind"], str(r["processes"]), str(r["samples"]), f"{r['median_seconds']:.2f}",
            f"{r['tokens_per_second']:.0f}", f"{r['efficiency']:.0%}", f"{r['peak_bytes'] / 1e9:.1f}",
        )
        for name, d in found.items() if name.startswith("scaling") for r in d["rows"]
    ]  # fmt: skip
    if rows:
        yield "## On more processes"
        yield ""
        yield "The model's shapes with 8 layers, one thread each."
        head = ("axis", "scaling", "processes", "samples", "s", "tokens/s", "of perfect", "GB")
        yield from table(head, rows)


def processor() -> str:
    """Name of the processor, where Linux reports it."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def page(out: Path) -> str:
    """Everything that was found, as Markdown."""
    files = [*JOINED, *(m.name for m in MEASUREMENTS)]
    found = {name: json.loads((out / f"{name}.json").read_text()) for name in files if (out / f"{name}.json").exists()}
    if not found:
        raise ValueError(f"{out} holds nothing that was measured; the .txt files there say why, where some were tried")
    first = next(iter(found.values()))
    known = ("commit", "python", "torch", "megatron-core", "transformers", "trl")
    lines = ["# A PPO step of SmolLM2-135M on a CPU", "", f"{processor()}; " + ", ".join(
        f"{name} {first[name]}" for name in known if name in first) + ". Medians, least and most.", ""]  # fmt: skip
    for section in (beside_trl, updates, steps, planned, scaling):
        lines += section(found)
    if (out / "joined-curves.txt").exists():
        lines += ["## What both learn", "", (out / "joined-curves.txt").read_text().strip(), ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [measurement.name for measurement in MEASUREMENTS]
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="SmolLM2-135M-Instruct's")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for what is measured and written")
    parser.add_argument("--only", nargs="*", choices=names, metavar="NAME", help="of --list; none: only write the page")
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{m.name:14} {m.minutes:3} minutes  {m.program}" for m in MEASUREMENTS))
        return 0
    if arguments.model is None or arguments.out is None:
        parser.error("--model and --out are wanted")
    if not (arguments.model / "config.json").exists():
        parser.error(f"--model {arguments.model} holds no config.json; give SmolLM2-135M-Instruct's folder")
    model, out = arguments.model.resolve(), arguments.out.resolve()  # the programs run in the repository
    out.mkdir(parents=True, exist_ok=True)
    chosen = [m for m in MEASUREMENTS if arguments.only is None or m.name in arguments.only]
    failed = [m.name for m in chosen if not measure(m, model, out)]
    join(out)
    draw(out)
    try:
        (out / "smollm2-step.md").write_text(page(out))
    except ValueError as error:
        print(f"throughput.py: error: {error}", file=sys.stderr)
        return 2
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
