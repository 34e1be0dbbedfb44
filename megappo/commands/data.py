"""`megappo data prepare`: a data set in the format of configurations."""

from __future__ import annotations

import argparse
from pathlib import Path

from megappo.commands import path_option, whole_option

_MOST_PUZZLES = 1_000_000
_LARGEST_SEED = 2**63 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megappo data`."""
    parser.add_argument("action", choices=("prepare",), help="write the files of a data set")
    parser.add_argument("name", metavar="NAME", help="gsm8k, math, dapo (with AIME 2024) or countdown")
    parser.add_argument("out", metavar="OUT", type=path_option, help="folder for the parquet files, such as data/gsm8k")
    parser.add_argument(
        "--from", dest="source", metavar="PATH", type=path_option, help="downloaded file or folder, instead of the hub"
    )
    parser.add_argument("--seed", default="0", metavar="N", help="seed of countdown (default: %(default)s)")
    parser.add_argument("--count", default="10000", metavar="N", help="training puzzles of countdown (%(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Write the files of a data set, and print a summary."""
    from megappo.data.prepare import prepare

    seed = whole_option("--seed", arguments.seed, 0, _LARGEST_SEED)
    count = whole_option("--count", arguments.count, 1, _MOST_PUZZLES)
    source = None if arguments.source is None else Path(arguments.source)
    for sentence in prepare(arguments.name, Path(arguments.out), source=source, seed=seed, count=count):
        print(sentence, flush=True)
