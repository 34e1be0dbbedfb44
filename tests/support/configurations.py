"""The shipped configurations and the commands in their header comments."""

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
    """Write a configuration with a model (its folder, and other fields of the section), data, a reward and steps."""
    path = folder / "first_try.yaml"
    path.write_text(_SHORT % model)
    return path


def head_command(path: Path, *programs: str) -> list[str]:
    """Return the words of the command in the header of a file that starts with one of the programs."""
    for command in head_commands(path):
        if command[0] in programs:
            return command
    raise AssertionError(f"{path.name} contains no command of {' or '.join(programs)}")


def head_commands(path: Path) -> list[list[str]]:
    """Return the words of each command in the header of a file."""
    return [shlex.split(line[1:]) for line in path.read_text().splitlines() if line.startswith("#   ")]


def trainer_ranks(path: Path) -> int:
    """Return the planned number of trainer ranks, without separate servers."""
    command = head_command(path, "megappo")
    return int(command[command.index("--gpus") + 1])


def assert_refused(path: Path, overrides: Sequence[str], ranks: int, message: str) -> None:
    """Check that the settings and the model are refused on this number of ranks with a message that contains a text."""
    arch = read_models(load_config(path), ROOT / "configs" / "models").models.actor
    with pytest.raises(ConfigError) as caught:
        derive(load_config(path, overrides), ranks, arch)
    assert [problem for problem in caught.value.problems if message in problem], caught.value.problems
