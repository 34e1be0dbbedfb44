#!/usr/bin/env python3
"""The parts of `launch/slurm/acceptance.sbatch`, which users start; see launch/README.md.

python -m tests.gpu.node_acceptance steps  --nodes N --ranks-per-node R --logs DIR CONFIG [key=value ...]
python -m tests.gpu.node_acceptance judge  ... --step NAME --code C CONFIG [key=value ...]
python -m tests.gpu.node_acceptance layouts --out DIR      on every rank of a job
python -m tests.gpu.node_acceptance table  --nodes N --ranks-per-node R --logs DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tests.gpu.acceptance import nodes
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import FAILED, Report, Row, join

NAME = "node-acceptance"


def parse(command_arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Exits with 2 for invalid arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for part in ("steps", "judge", "table"):
        of_job = parts.add_parser(part)
        of_job.add_argument("--nodes", type=int, required=True)
        of_job.add_argument("--ranks-per-node", type=int, required=True)
        of_job.add_argument("--logs", type=Path, required=True)
        if part == "judge":
            of_job.add_argument("--step", required=True)
            of_job.add_argument("--code", type=int, required=True)
        if part != "table":
            of_job.add_argument("given", nargs="+", metavar="CONFIG key=value")
    parts.add_parser("layouts").add_argument("--out", type=Path, required=True)
    return parser.parse_args(command_arguments)


def run_layouts(out: Path) -> None:
    """Run the layouts on every rank. Rank 0 writes the rows."""
    from megappo.config.schema import RuntimeSettings
    from megappo.runtime.process import start_runtime
    from tests.gpu.acceptance.layouts import against_oracle

    with start_runtime(RuntimeSettings(collective_timeout_seconds=120)) as runtime:
        place = Place(runtime.device.type, True, str(out / "scratch"))
        collected: list[Row] = []
        for row in against_oracle(place, runtime):
            collected.append(row)
            if runtime.is_main:
                print(f"{row.verdict:<8} {row.what}: {row.result}", flush=True)
        if runtime.is_main:
            (out / f"{nodes.LAYOUTS}.json").write_text(json.dumps([asdict(row) for row in collected]))


def judge(shape: nodes.Shape, name: str, code: int, configuration: Sequence[str]) -> None:
    """Write the rows of one step."""
    (step,) = (step for step in nodes.steps(shape, configuration) if step.name == name)
    report = Report(shape.logs / "rows" / name, {"configuration": " ".join(configuration)})
    for row in nodes.rows(step, shape, code):
        report.add(name, row)


def table(shape: nodes.Shape) -> int:
    """Join the rows of all steps in order and return the exit code of the job."""
    import torch

    paths = sorted((shape.logs / "rows").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report = join(paths, shape.logs / NAME)
    report.head |= {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "ranks": f"{shape.nodes} x {shape.ranks_per_node}, {device}",
        "versions": ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core", "transformers")),
    }
    report.write()
    print(f"{report.path}.md: {report.verdict}")
    return int(report.verdict == FAILED)


def main(command_arguments: Sequence[str] | None = None) -> int:
    """Run one part and return the exit code."""
    arguments = parse(command_arguments)
    if arguments.part == "layouts":
        run_layouts(arguments.out)
        return 0
    shape = nodes.Shape(arguments.nodes, arguments.ranks_per_node, arguments.logs)
    if arguments.part == "table":
        return table(shape)
    if arguments.part == "judge":
        judge(shape, arguments.step, arguments.code, arguments.given)
        return 0
    try:
        print(nodes.lines(nodes.steps(shape, arguments.given)))
    except ValueError as error:
        print(f"node_acceptance: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
