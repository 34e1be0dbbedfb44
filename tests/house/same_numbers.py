"""Whether a change left the arithmetic alone: the quickstart's first steps here and in another revision.

Usage: python -m tests.house.same_numbers [REVISION] [key=value ...]

The revision is main where none is named. Exit code 1 where a number differs.

Compares the final weights byte by byte, and every metric that no clock is in to the last bit. Metrics that only one of
the two has are named and do not count.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.attempts import timeless
from tests.support.places import ROOT

SHORT = ("run.steps=4", "evaluation.every_steps=2", "logging.console=quiet", "checkpoint=null")


def run(tree: Path, directory: Path, overrides: list[str]) -> None:
    """The quickstart of a tree on two processes, by this Python."""
    environment = os.environ | {
        "MEGAPPO_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    words = ["2", "train", "configs/quickstart.yaml", f"run.directory={directory}", *SHORT, *overrides]
    subprocess.run([tree / "launch" / "torchrun.sh", *words], cwd=tree, env=environment, check=True)


def differences(here: Path, there: Path) -> list[str]:
    """A sentence for each number that differs between two runs, the first step's first."""
    found = []
    for mine, theirs in zip(timeless(here / "metrics.jsonl"), timeless(there / "metrics.jsonl"), strict=True):
        for name in sorted(mine.keys() & theirs.keys()):
            if repr(mine[name]) != repr(theirs[name]):  # NaN is NaN
                found.append(f"step {mine['step']}: {name} was {theirs[name]} and is {mine[name]}")
    for file in sorted((there / "final").glob("*.safetensors")):
        if (here / "final" / file.name).read_bytes() != file.read_bytes():
            found.append(f"the final weights in {file.name} are others")
    only = timeless(here / "metrics.jsonl")[-1].keys() ^ timeless(there / "metrics.jsonl")[-1].keys()
    print(f"metrics of one of the two alone: {', '.join(sorted(only)) or 'none'}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="main")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as work:
        tree, here, there = (Path(work) / name for name in ("tree", "here", "there"))
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), given.revision], check=True)
        try:
            run(ROOT, here, given.overrides)
            run(tree, there, given.overrides)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
        found = differences(here, there)
    print("\n".join(found) or f"the same numbers as {given.revision}, to the last bit")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
