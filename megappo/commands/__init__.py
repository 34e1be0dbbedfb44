"""Subcommands. Each module has `add_arguments(parser)` and `run(arguments)`.

A module is imported when its command is called, so that a command does not import the libraries of other commands.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from megappo.errors import ConfigError, expanded, shortened, whole_number


class CommandModule(Protocol):
    """Interface of a subcommand's module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of the command."""

    def run(self, arguments: argparse.Namespace) -> bool | None:
        """Run the command. False means that the command ran with a negative result (exit code 1)."""


@dataclass(frozen=True)
class Command:
    """Subcommand and its properties."""

    help: str
    on_ranks: bool = False
    """Whether a launcher may start the command on several ranks."""
    takes_overrides: bool = False
    """Whether `key=value` arguments are allowed after the other arguments."""
    builds_models: bool = True
    """Whether the command may build models with transformers, instead of reading only configurations and tokenizers."""


COMMANDS = {
    "quickstart": Command(
        "train a small model on single-digit sums with two processes on this machine", takes_overrides=True
    ),
    "init": Command("write a commented configuration for this machine and a task", builds_models=False),
    "train": Command("run PPO with the settings of a YAML file", on_ranks=True, takes_overrides=True),
    "plan": Command(
        "estimate the memory and the speed of a run before its start",
        takes_overrides=True,
        builds_models=False,
    ),
    "doctor": Command(
        "report what is fine, slow or broken on this machine or on all ranks", on_ranks=True, takes_overrides=True
    ),
    "serve": Command(
        "run one server of responses for trainers on other machines, and restart it", takes_overrides=True
    ),
    "eval": Command("score a model on data.validation and data.validation_sets", on_ranks=True, takes_overrides=True),
    "export": Command("write a checkpoint of a run as a Hugging Face folder, or for Megatron-LM"),
    "data": Command("write GSM8K, MATH, DAPO or Countdown in the format of configurations"),
    "settings": Command("explain a setting, a section, a metric, or a name from other trainers"),
    "guide": Command("print a guide, such as ppo or troubleshoot, or a section of a guide"),
    "completion": Command("print a script for bash or zsh that completes commands, options and settings"),
    "report": Command("show the course of a metric in one run or several"),
    "inspect": Command("show samples that a run saved, token by token: mask, reward, value, return, advantage"),
}
"""Subcommands by name. The name is also the name of the module in this package."""


def module_of(command: str) -> CommandModule:
    """Import and return the module of a subcommand."""
    return cast(CommandModule, import_module(f"{__name__}.{command}"))


def path_option(text: str) -> str:
    """Expand `~` in a path, as a `type` of argparse. Raises ArgumentTypeError for a variable in the path."""
    try:
        return expanded(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole_option(name: str, text: str, least: int, most: int) -> int:
    """Return an integer option. Raises ConfigError for other text and for a number out of bounds."""
    number = whole_number(text)
    if number is None or not least <= number <= most:
        raise ConfigError(f"{name} is '{shortened(text)}', must be a whole number from {least} to {most}")
    return number


def ranks_option(name: str, text: str | None) -> int | None:
    """Return an option for a number of devices or nodes, or None if it is not set. Raises the errors of
    `whole_option`."""
    from megappo.config.base import LARGEST_WORLD

    return None if text is None else whole_option(name, text, 1, LARGEST_WORLD)


def seconds_option(name: str, text: str, most: float) -> float:
    """Return an option in seconds. Raises ConfigError for other text, a negative number or a number above `most`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= most:
        raise ConfigError(f"{name} is '{shortened(text)}', must be a number of seconds from 0 to {most:g}")
    return seconds


def add_config_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the arguments for a configuration and its overrides."""
    parser.add_argument("config", metavar="CONFIG", nargs="?" if optional else None, type=path_option, help="YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override such as run.steps=10, or another file"
    )


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the devices of a planned run."""
    parser.add_argument("--machine", metavar="NAME", help="h100, cpu, ... or a YAML file (default: by runtime.device)")
    parser.add_argument("--gpus", metavar="N", help="devices, one per rank (default: the fewest the layouts need)")
