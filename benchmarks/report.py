"""The command lines of the benchmark programs, and their results as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def parser_of(doc: str | None, *, has_config: bool = True) -> argparse.ArgumentParser:
    """Return a parser with --json, and with a configuration and its overrides."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    if has_config:
        parser.add_argument("config", metavar="CONFIG")
        parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results")
    return parser


def refuse(program: str, error: ValueError) -> int:
    """Print the error of a benchmark program and return its exit code."""
    print(f"{program}.py: error: {error}", file=sys.stderr)
    return 2


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1, width: int | None = None
) -> None:
    """Print a table whose first columns are texts, and whose other columns are numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < texts else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)


def write_json(arguments: argparse.Namespace, results: Mapping[str, Any]) -> None:
    """Write the results to the file of --json, if it is given."""
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


def of_config(benchmark: str, arguments: argparse.Namespace, *packages: str) -> dict[str, Any]:
    """Return the name of a benchmark, its configuration and the versions of packages."""
    settings = {"config": arguments.config, "overrides": arguments.overrides}
    return {"benchmark": benchmark, **settings, **versions(*packages)}


def versions(*more: str) -> dict[str, str]:
    """Return the device, the commit, and the versions of packages, including `more`."""
    from importlib.metadata import version

    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    packages = {name: version(name) for name in ("torch", "megatron-core", "transformers", *more)}
    return {"device": device, "commit": commit(), "python": platform.python_version(), **packages}


def commit() -> str:
    """Git commit of the benchmark programs."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
