"""The shipped configurations and the commands in their heads."""

from __future__ import annotations

import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGURATIONS = sorted((ROOT / "configs").glob("*.yaml"))


def head_command(path: Path, *programs: str) -> list[str]:
    """The words of the command in a file's head that starts with one of the programs."""
    for line in path.read_text().splitlines():
        words = shlex.split(line.removeprefix("#")) if line.startswith("#   ") else []
        if words and words[0] in programs:
            return words
    raise AssertionError(f"{path.name} shows no {' or '.join(programs)}")


def trainer_ranks(path: Path) -> int:
    """How many ranks it is planned for, servers of their own aside."""
    words = head_command(path, "megappo")
    return int(words[words.index("--gpus") + 1])
