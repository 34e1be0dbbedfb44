"""Check that a change does not affect the results: compare the first steps of the quickstart with another revision.

Usage: python -m tests.house.same_numbers [REVISION] [key=value ...]

The default revision is main. The exit code is 1 if a number differs.

The final weights must be bitwise equal, and every metric that does not depend on time, too. Metrics that only one of
the revisions has are listed and ignored.
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
    """Run the quickstart of a source tree on two processes, with this Python."""
    environment = os.environ | {
        "MEGAPPO_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    arguments = ["2", "train", "configs/quickstart.yaml", f"run.directory={directory}", *SHORT, *overrides]
    subprocess.run([tree / "launch" / "torchrun.sh", *arguments], cwd=tree, env=environment, check=True)


def differences(current: Path, reference: Path) -> list[str]:
    """Return a sentence for each number that differs between two runs, in the order of steps."""
    sentences = []
    for metrics, expected in zip(
        timeless(current / "metrics.jsonl"), timeless(reference / "metrics.jsonl"), strict=True
    ):
        for name in sorted(metrics.keys() & expected.keys()):
            if repr(metrics[name]) != repr(expected[name]):  # NaN equals NaN
                sentences.append(f"step {metrics['step']}: {name} was {expected[name]} and is {metrics[name]}")
    for file in sorted((reference / "final").glob("*.safetensors")):
        if (current / "final" / file.name).read_bytes() != file.read_bytes():
            sentences.append(f"the final weights in {file.name} differ")
    only = timeless(current / "metrics.jsonl")[-1].keys() ^ timeless(reference / "metrics.jsonl")[-1].keys()
    print(f"metrics of only one run: {', '.join(sorted(only)) or 'none'}")
    return sentences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="main")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as work:
        tree, current, reference = (Path(work) / name for name in ("tree", "here", "there"))
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), options.revision], check=True)
        try:
            run(ROOT, current, options.overrides)
            run(tree, reference, options.overrides)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
        sentences = differences(current, reference)
    print("\n".join(sentences) or f"all numbers are equal to {options.revision}")
    sys.exit(1 if sentences else 0)


if __name__ == "__main__":
    main()
