#!/usr/bin/env python3
"""Check all features and measure the speed on this GPU.

Usage: python -m tests.gpu.gpu_acceptance [--part 1|2|3] [--wheels DIR] [--out DIR] [--minutes M] [--only STEP ...]
       python -m tests.gpu.gpu_acceptance --join PART1.json PART2.json PART3.json --out DIR
       python -m tests.gpu.gpu_acceptance --list

The command needs one GPU and no network. It has three parts of at most ten minutes each; the third part uses SGLang.
The command prints one line per result and writes a table for each part, gpu-acceptance-partN.json and .md, after every
result. Every step has a time limit and runs in a process that is replaced if the step fails. Steps that cannot run on
this machine are skipped with a reason. Exit code 0: nothing failed; 1: a step failed; 2: wrong arguments.
`--device cpu --tiny` runs the same steps on a CPU, with sizes that only show that the steps run.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.gpu.acceptance import wheels
from tests.gpu.acceptance.registry import STEPS, Place
from tests.gpu.acceptance.runner import environment, run_steps
from tests.gpu.acceptance.table import FAILED, Report, join

NAME = "gpu-acceptance"
PARTS = [1, 2, 3]


def parse(command_arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Exits with 2 for invalid arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=PARTS, help="part to run; default: all parts in sequence")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use sizes that only show that the steps run")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="wheels of missing packages; nothing is downloaded")
    parser.add_argument("--out", type=Path, default=Path("acceptance"), metavar="DIR", help="folder of the table")
    parser.add_argument("--minutes", type=float, default=9.5, help="minutes of each part")
    parser.add_argument(
        "--only", nargs="+", choices=[s.name for s in STEPS], metavar="STEP", help="run only these steps"
    )
    parser.add_argument("--list", action="store_true", help="list the steps with descriptions")
    parser.add_argument("--join", nargs="+", type=Path, metavar="JSON", help="join tables into one")
    arguments = parser.parse_args(command_arguments)
    if not 0 < arguments.minutes <= 600:
        parser.error(f"--minutes is {arguments.minutes:g}, must be above 0 and at most 600")
    return arguments


def sees_cuda(variables: dict[str, str]) -> bool:
    """Return whether torch has a CUDA device. A separate process checks this, so the device is released."""
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    return subprocess.run([sys.executable, "-c", code], env=variables, check=False).returncode == 0


def run_part(
    part: int, arguments: argparse.Namespace, variables: dict[str, str], scratch: Path, report: Report
) -> None:
    """Run all steps of a part."""
    steps = [step for step in STEPS if step.part == part and step.name in (arguments.only or [step.name])]
    place = Place(arguments.device, arguments.tiny, str(scratch))
    log = arguments.out / f"{NAME}-part{part}.log"
    run_steps(steps, place, report, seconds=60 * arguments.minutes, variables=variables, log=log)
    report.write()


def accept(arguments: argparse.Namespace, scratch: Path) -> int:
    """Run the selected parts and return the exit code."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    site, installed = scratch / "site", []
    if arguments.wheels is not None:
        try:
            installed = list(wheels.install(arguments.wheels, site))
        except ValueError as error:
            print(f"gpu_acceptance: error: {error}", file=sys.stderr)
            return 2
    variables = environment(site)
    if arguments.device == "cuda" and not sees_cuda(variables):
        print("gpu_acceptance: error: torch shows no CUDA device here; add --device cpu --tiny", file=sys.stderr)
        return 2
    code = 0
    for part in [arguments.part] if arguments.part else PARTS:
        head = {
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "sizes": "tiny models with the names of large models" if arguments.tiny else "as named",
            "host": f"{platform.machine()}, Python {platform.python_version()}",
            "part": part,
        }
        report = Report(arguments.out / f"{NAME}-part{part}", head)
        for row in installed:
            report.add("wheels", row)
        run_part(part, arguments, variables, scratch, report)
        print(f"{report.path}.md: {report.verdict}")
        code = max(code, int(report.verdict == FAILED))
    return code


def main(command_arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, run the steps, and print the results."""
    arguments = parse(command_arguments)
    if arguments.list:
        print("\n".join(f"part {step.part}  {step.name:<16}{step.proves}" for step in STEPS))
        return 0
    if arguments.join:
        report = join(arguments.join, arguments.out / NAME)
        print(f"{report.path}.md: {report.verdict}")
        return int(report.verdict == FAILED)
    with tempfile.TemporaryDirectory(prefix="megappo-acceptance-") as scratch:
        return accept(arguments, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
