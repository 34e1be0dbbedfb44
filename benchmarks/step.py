#!/usr/bin/env python3
"""How long does a PPO step take, stage by stage?

Usage: torchrun --nproc-per-node N benchmarks/step.py CONFIG [key=value ...] [--warmup 2] [--repeat 5] [--json FILE]

Runs real steps of any configuration (warm-up steps are not counted) and prints for each stage the median, minimum and
maximum seconds and the tokens and samples per second of the median. Nothing is evaluated or exported; the run directory
is a temporary one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from megappo.config import Config, ConfigError, derive_run, load_config  # noqa: E402
from megappo.plan.here import resolve_here  # noqa: E402


@dataclass(frozen=True)
class StageTiming:
    """Seconds of a stage over the counted steps; tokens and samples (of the whole step) per median second."""

    stage: str
    median_seconds: float
    min_seconds: float
    max_seconds: float
    tokens_per_second: float
    samples_per_second: float


def run_steps(config: Config, warmup: int, repeat: int) -> list[dict[str, float]] | None:
    """The metrics of the counted steps on the main rank, None elsewhere."""
    from megappo.ppo.parts import assemble
    from megappo.ppo.reporting import Reporter
    from megappo.ppo.trainer import Trainer
    from megappo.runtime.process import start_runtime

    derived = derive_run(config, int(os.environ.get("WORLD_SIZE", "1")))
    with start_runtime(config.runtime) as runtime, closing(Reporter(config, derived, runtime)) as reporter:
        parts = assemble(config, derived, runtime)
        try:
            trainer = Trainer(parts, reporter)
            trainer.sync_weights()
            counted = []
            for step in range(1, warmup + repeat + 1):
                trainer.step = step
                trainer.ppo_step()
                if step > warmup:
                    counted.append(dict(trainer.metrics))
        finally:
            parts.close()
        return counted if runtime.is_main else None


def summarise(steps: list[dict[str, float]]) -> list[StageTiming]:
    """One row per stage, the whole step last."""
    tokens = statistics.median(step["step_tokens"] for step in steps)
    samples = statistics.median(step["step_samples"] for step in steps)
    names = dict.fromkeys(name for step in steps for name in step if name.startswith("time/"))
    rows = []
    for name in names:
        seconds = [step[name] for step in steps if name in step]
        median = statistics.median(seconds)
        rows.append(
            StageTiming(
                name.removeprefix("time/"), median, min(seconds), max(seconds), tokens / median, samples / median
            )
        )
    return rows


def print_rows(rows: list[StageTiming], title: str) -> None:
    """A table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in ("stage", "median s", "min s", "max s", "tokens/s", "samples/s"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for r in rows:
        table.add_row(
            r.stage, f"{r.median_seconds:.3f}", f"{r.min_seconds:.3f}", f"{r.max_seconds:.3f}",
            f"{r.tokens_per_second:.0f}", f"{r.samples_per_second:.1f}",
        )  # fmt: skip
    Console().print(table)


def versions() -> dict[str, str]:
    """What the figures were measured with."""
    from importlib.metadata import version

    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    packages = {name: version(name) for name in ("torch", "megatron-core", "transformers")}
    return {"device": device, "python": platform.python_version(), **packages}


def main() -> int:
    parser = argparse.ArgumentParser(description="Seconds per stage of a PPO step.")
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not counted")
    parser.add_argument("--repeat", type=int, default=5, help="steps that are counted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    arguments = parser.parse_intermixed_args()
    quiet = ["evaluation=null", "data.validation=null", "logging.console=quiet", "logging.tensorboard=false"]
    with tempfile.TemporaryDirectory() as directory:
        place = [f"run.directory={directory}", "run.export_final_model=false"]
        try:
            config = load_config(arguments.config, [*quiet, *arguments.overrides, *place])
            config = resolve_here(config)
            steps = run_steps(config, arguments.warmup, arguments.repeat)
        except ConfigError as error:
            print(f"step.py: error: {error}", file=sys.stderr)
            return 2
    if steps is None:
        return 0
    rows = summarise(steps)
    print_rows(rows, f"{config.run.name}: {arguments.repeat} steps after {arguments.warmup} of warm-up")
    if arguments.json is not None:
        report = {"config": arguments.config, "overrides": arguments.overrides, **versions()}
        arguments.json.write_text(json.dumps({**report, "stages": [asdict(r) for r in rows]}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
