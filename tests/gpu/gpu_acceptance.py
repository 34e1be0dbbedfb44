#!/usr/bin/env python3
"""Does everything work on this GPU, and how fast is it?

Usage: python -m tests.gpu.gpu_acceptance [--part 1|2|3] [--wheels DIR] [--out DIR] [--minutes M] [--only STEP ...]
       python -m tests.gpu.gpu_acceptance --join PART1.json PART2.json PART3.json --out DIR
       python -m tests.gpu.gpu_acceptance --list

One GPU, no network, three parts of at most ten minutes each, the third with SGLang. Prints one line per finding and
writes one table for each part,
gpu-acceptance-partN.json and .md, anew with each of them. Every step has a deadline and runs in a process that is
replaced when the step fails; what cannot run here is skipped with its reason. Exit code 0: nothing failed; 1: something
did; 2: wrong arguments. `--device cpu --tiny` runs the same steps on a CPU, on sizes that show only that they run.
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


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 where it makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=PARTS, help="one of the runs; default: all, one by one")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that show only that everything runs")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="wheels of what is missing; nothing is fetched")
    parser.add_argument("--out", type=Path, default=Path("acceptance"), metavar="DIR", help="where the table goes")
    parser.add_argument("--minutes", type=float, default=9.5, help="of each part")
    parser.add_argument("--only", nargs="+", choices=[s.name for s in STEPS], metavar="STEP", help="these steps alone")
    parser.add_argument("--list", action="store_true", help="say what the steps prove")
    parser.add_argument("--join", nargs="+", type=Path, metavar="JSON", help="one table of several")
    arguments = parser.parse_args(words)
    if not 0 < arguments.minutes <= 600:
        parser.error(f"--minutes is {arguments.minutes:g}, must be above 0 and at most 600")
    return arguments


def sees_cuda(given: dict[str, str]) -> bool:
    """Whether torch shows a CUDA device; asked in a process of its own, which gives the device back."""
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    return subprocess.run([sys.executable, "-c", code], env=given, check=False).returncode == 0


def run_part(part: int, arguments: argparse.Namespace, given: dict[str, str], scratch: Path, report: Report) -> None:
    """All steps of a part."""
    steps = [step for step in STEPS if step.part == part and step.name in (arguments.only or [step.name])]
    place = Place(arguments.device, arguments.tiny, str(scratch))
    log = arguments.out / f"{NAME}-part{part}.log"
    run_steps(steps, place, report, seconds=60 * arguments.minutes, given=given, log=log)
    report.write()


def accept(arguments: argparse.Namespace, scratch: Path) -> int:
    """Run the parts that are asked for; the exit code."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    site, installed = scratch / "site", []
    if arguments.wheels is not None:
        try:
            installed = list(wheels.install(arguments.wheels, site))
        except ValueError as error:
            print(f"gpu_acceptance: error: {error}", file=sys.stderr)
            return 2
    given = environment(site)
    if arguments.device == "cuda" and not sees_cuda(given):
        print("gpu_acceptance: error: torch shows no CUDA device here; add --device cpu --tiny", file=sys.stderr)
        return 2
    code = 0
    for part in [arguments.part] if arguments.part else PARTS:
        head = {
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "sizes": "tiny models under the names of large ones" if arguments.tiny else "as named",
            "host": f"{platform.machine()}, Python {platform.python_version()}",
            "part": part,
        }
        report = Report(arguments.out / f"{NAME}-part{part}", head)
        for row in installed:
            report.add("wheels", row)
        run_part(part, arguments, given, scratch, report)
        print(f"{report.path}.md: {report.verdict}")
        code = max(code, int(report.verdict == FAILED))
    return code


def main(words: Sequence[str] | None = None) -> int:
    """Parse, run, say."""
    arguments = parse(words)
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
