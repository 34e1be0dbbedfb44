"""The shipped configurations and the commands in their heads."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from megappo.config import ConfigError, load_config
from megappo.config.derive import derive
from megappo.plan.planner import read_models
from tests.support.places import ROOT

CONFIGURATIONS = sorted((ROOT / "configs").glob("*.yaml"))
_SHORT = """
run: {steps: 2}
model: {path: %s}
data:
  train: {source: 'megappo.data.arithmetic:sums', options: {max_operand: 4}}
reward: {function: exact}
"""


def write_short(folder: Path, model: str = str(ROOT / "configs" / "models" / "Qwen3-0.6B")) -> Path:
    """A configuration of nothing but a model (its folder, and more of its section), data, a reward and steps."""
    path = folder / "first_try.yaml"
    path.write_text(_SHORT % model)
    return path


def head_command(path: Path, *programs: str) -> list[str]:
    """The words of the command in a file's head that starts with one of the programs."""
    for words in head_commands(path):
        if words[0] in programs:
            return words
    raise AssertionError(f"{path.name} shows no {' or '.join(programs)}")


def head_commands(path: Path) -> list[list[str]]:
    """The words of each command in a file's head."""
    return [shlex.split(line[1:]) for line in path.read_text().splitlines() if line.startswith("#   ")]


def trainer_ranks(path: Path) -> int:
    """How many ranks it is planned for, servers of their own aside."""
    words = head_command(path, "megappo")
    return int(words[words.index("--gpus") + 1])


def assert_refused(path: Path, overrides: Sequence[str], ranks: int, words: str) -> None:
    """The settings and its model, on so many ranks, break a rule whose sentence has these words."""
    arch = read_models(load_config(path), ROOT / "configs" / "models").models.actor
    with pytest.raises(ConfigError) as caught:
        derive(load_config(path, overrides), ranks, arch)
    assert [problem for problem in caught.value.problems if words in problem], caught.value.problems
