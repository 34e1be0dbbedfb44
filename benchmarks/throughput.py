#!/usr/bin/env python3
"""Measure a PPO step on a CPU with all benchmarks behind published numbers, and write the page of results.

Usage: python -m benchmarks.throughput --model FOLDER --out FOLDER [--only NAME ...] [--list]

The program measures SmolLM2-135M-Instruct (`--model` is its folder) with the other programs of this folder, in order
of importance. This takes about two and a half hours on two idle cores, and 20 GB of memory. Existing results in
`--out` are not measured again, so the program can be stopped and restarted. At the end the program writes
`smollm2-step.md`, and pictures if matplotlib is installed.
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
    """Command with the name of its result file."""

    name: str
    minutes: int
    program: str
    arguments: tuple[str, ...]
    ranks: int = 1
    is_small: bool = False
    """Whether the model has only eight layers, so that four processes fit into memory."""

    def command(self, model: Path, out: Path) -> list[str]:
        """Return the command line of the measurement."""
        launch = [sys.executable]
        if self.ranks > 1:
            launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        folder = eight_layers(model, out) if self.is_small else model
        program = ["-m", f"benchmarks.{self.program}", CONFIG, f"model.path={folder}", *self.arguments]
        return [*launch, *program, "--json", str(out / f"{self.name}.json")]


def _trl_measurement(
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
    _trl_measurement("trl-full", "full:64", 1, 5, 8),
    _trl_measurement("trl-even", "even:1-64", 1, 5, 8),
    _trl_measurement("trl-tail", "tail:32-256", 1, 5, 4, minutes=42),
    Measurement("step-dp2", 5, "step", (*ALONE, *STEP, "runtime.threads_per_rank=1", "--repeat", "5"), 2),
    Measurement("overhead", 2, "overhead", ("rollout.max_response_tokens=64", *REFERENCE, "--repeat", "5")),
    Measurement(
        "planned", 8, "planned",
        (*ALONE, *STEP, "--ranks", "1", *_THREADS, "--sizes", "16:32", "32:32", "32:64", "--repeat", "3"),
    ),
    _scaling("scaling", 8),
    Measurement("step-pp2", 5, "step", (*STEP, "runtime.threads_per_rank=1", "--repeat", "5"), 2),
    _trl_measurement("trl-full-dp2", "full:64", 2, 5, 8),
    *(
        Measurement(
            f"curves-{seed}", 13, "trl",
            (*MICROBATCHES, *SHARED, "rollout.max_response_tokens=16", *_THREADS, "--ranks", "2", "--curves", "--seeds",
             str(seed), "--steps", "20", "--trl-microbatch", "8"),
        )
        for seed in (1, 2, 3)
    ),
    _scaling("scaling-pp", 5, "--axis", "pipeline", "--kinds", "strong"),
    _trl_measurement("trl-bf16", "full:64", 1, 5, 8, "--precision", "bfloat16"),
    _trl_measurement("trl-even-dp2", "even:1-64", 2, 5, 8),
)  # fmt: skip
JOINED = {
    "joined": ["trl-full", "trl-even", "trl-tail"],
    "joined-more": ["trl-full-dp2", "trl-even-dp2", "trl-bf16"],
    "joined-curves": ["curves-1", "curves-2", "curves-3"],
}
"""Result files of trl.py that are combined to one file."""


def eight_layers(model: Path, out: Path) -> Path:
    """Copy the model's folder without weights, and set the number of layers to eight. Returns the new folder."""
    folder = out / EIGHT_LAYERS
    if not folder.exists():
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin", ".*"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 8}, indent=2))
    return folder


def measure(measurement: Measurement, model: Path, out: Path) -> bool:
    """Run a measurement unless its file exists. Returns whether the file exists afterwards."""
    file = out / f"{measurement.name}.json"
    if not file.exists():
        print(f"{measurement.name}: about {measurement.minutes} minutes", flush=True)
        of_drawn = ["model.init=random"] if measurement.is_small else []
        with (out / f"{measurement.name}.txt").open("w") as log:
            command = [*measurement.command(model, out), *of_drawn]
            done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            file.unlink(missing_ok=True)
            print(f"{measurement.name} failed with status {done.returncode}; see {log.name}", flush=True)
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
            output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
            (out / f"{name}.txt").write_text(output)


def draw(out: Path) -> None:
    """Draw pictures if matplotlib is installed."""
    drawn = ("joined", "joined-curves", *(m.name for m in MEASUREMENTS if m.program != "trl"))
    files = [str(out / f"{name}.json") for name in drawn if (out / f"{name}.json").exists()]
    if files and importlib.util.find_spec("matplotlib") is not None:
        subprocess.run([sys.executable, "-m", "benchmarks.plots", *files, "--out", str(out)], cwd=ROOT, check=True)


Documents = Mapping[str, dict[str, Any]]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield ""
    yield from (f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
    yield ""


def trl_comparison(documents: Documents) -> Iterator[str]:
    """Yield the comparison with TRL: speed, memory, and learning curves."""
    rows = [row for name in ("joined", "joined-more") for row in documents.get(name, {"rows": []})["rows"]]
    if rows:
        yield "## Comparison with TRL's experimental PPO"
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


def updates(documents: Documents) -> Iterator[str]:
    """Yield the comparison of updates with the bare model."""
    rows = [
        (
            name, r["role"], f"{d['size']['shortest']} to {d['size']['longest']}",
            f"{statistics.median(r['update_seconds']):.2f}", f"{statistics.median(r['bare_seconds']):.2f}",
            f"{r['median_ratio']:.2f}", f"{min(r['ratios']):.2f}", f"{max(r['ratios']):.2f}",
            f"{r['median_cpu_ratio']:.2f}", r["form"],
        )
        for name, d in documents.items() if name.startswith("update") for r in d["rows"]
    ]  # fmt: skip
    if rows:
        yield "## Comparison of updates with the bare model"
        head = ("", "role", "tokens", "update s", "bare s", "ratio", "from", "to", "CPU ratio", "bare model")
        yield from table(head, rows)


def steps(documents: Documents) -> Iterator[str]:
    """Yield the tables of a step's stages, and of its cost per sample outside the models."""
    of_steps = {name: d for name, d in documents.items() if name.startswith("step-")}
    if of_steps:
        names = [stage["stage"] for stage in next(iter(of_steps.values()))["stages"]]
        rows = [
            (name, *(f"{by.get(stage, 0.0):.2f}" for stage in names), f"{d['outside_share']:.1%}")
            for name, d in of_steps.items()
            for by in [{stage["stage"]: stage["median_seconds"] for stage in d["stages"]}]
        ]
        yield "## Stages of a step"
        yield from table(("seconds", *names, "outside"), rows)
    if "overhead" in documents:
        yield "## Cost of a sample outside generation and models"
        rows = [
            (
                f"{r['samples']:,}",
                f"{statistics.median(r['cpu_seconds']):.3f}",
                f"{1e3 * r['cpu_seconds_per_sample']:.3f}",
            )
            for r in documents["overhead"]["rows"]
        ]
        yield from table(("samples", "CPU s of a step", "CPU ms of a sample"), rows)


def planned(documents: Documents) -> Iterator[str]:
    """Yield the comparison of planned and measured seconds."""
    if "planned" in documents:
        yield "## Planned and measured steps"
        rows = [
            (r["words"], stage, f"{p:.2f}", f"{r['measured'][stage]:.2f}", f"{p / r['measured'][stage]:.2f}")
            for r in documents["planned"]["rows"]
            for stage, p in r["planned"].items()
        ]
        yield from table(("a step of", "stage", "planned s", "measured s", "planned/measured"), rows)


def scaling(documents: Documents) -> Iterator[str]:
    """Yield the table of measurements with more processes."""
    rows = [
        (
            r["axis"], r["kind"], str(r["processes"]), str(r["samples"]), f"{r['median_seconds']:.2f}",
            f"{r['tokens_per_second']:.0f}", f"{r['efficiency']:.0%}", f"{r['peak_bytes'] / 1e9:.1f}",
        )
        for name, d in documents.items() if name.startswith("scaling") for r in d["rows"]
    ]  # fmt: skip
    if rows:
        yield "## Scaling"
        yield ""
        yield "The model's shapes with 8 layers, one thread each."
        head = ("axis", "scaling", "processes", "samples", "s", "tokens/s", "of perfect", "GB")
        yield from table(head, rows)


def processor() -> str:
    """Return the name of the processor, if Linux reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def page(out: Path) -> str:
    """Return all results as a Markdown page."""
    files = [*JOINED, *(m.name for m in MEASUREMENTS)]
    documents = {
        name: json.loads((out / f"{name}.json").read_text()) for name in files if (out / f"{name}.json").exists()
    }
    if not documents:
        raise ValueError(f"{out} contains no results; the .txt files contain the output of failed measurements")
    first = next(iter(documents.values()))
    known = ("commit", "python", "torch", "megatron-core", "transformers", "trl")
    lines = ["# A PPO step of SmolLM2-135M on a CPU", "", f"{processor()}; " + ", ".join(
        f"{name} {first[name]}" for name in known if name in first) + ". Medians, minima and maxima.", ""]  # fmt: skip
    for section in (trl_comparison, updates, steps, planned, scaling):
        lines += section(documents)
    if (out / "joined-curves.txt").exists():
        lines += ["## Learning curves", "", (out / "joined-curves.txt").read_text().strip(), ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [measurement.name for measurement in MEASUREMENTS]
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for results")
    parser.add_argument("--only", nargs="*", choices=names, metavar="NAME", help="see --list; no names: only the page")
    parser.add_argument("--list", action="store_true", help="list the measurements and exit")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{m.name:14} {m.minutes:3} minutes  {m.program}" for m in MEASUREMENTS))
        return 0
    if arguments.model is None or arguments.out is None:
        parser.error("--model and --out are required")
    if not (arguments.model / "config.json").exists():
        parser.error(f"--model {arguments.model} contains no config.json; pass the folder of SmolLM2-135M-Instruct")
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
