"""The subcommands: one module each, with `add_arguments(parser)` and `run(arguments)`.

A module is imported when its command is called, so that none waits for what another needs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from megappo.errors import ConfigError, expanded, shortened, whole_number


class CommandModule(Protocol):
    """The interface of a subcommand's module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of the command."""

    def run(self, arguments: argparse.Namespace) -> bool | None:
        """Run the command; False: it ran, and its answer is no (exit code 1)."""


@dataclass(frozen=True)
class Command:
    """A subcommand."""

    help: str
    on_ranks: bool = False
    """Whether a launcher may start it as several ranks."""
    takes_overrides: bool = False
    """Whether `key=value` may follow its arguments."""
    builds_models: bool = True
    """Whether transformers may be asked for models, not for configurations and tokenizers alone."""


COMMANDS = {
    "quickstart": Command(
        "train a small model on single-digit sums, by two processes of this machine", takes_overrides=True
    ),
    "init": Command("write a commented configuration for this machine and a task", builds_models=False),
    "train": Command("run PPO as a YAML file describes it", on_ranks=True, takes_overrides=True),
    "plan": Command(
        "say what a run will need and how fast it will be, before it is started",
        takes_overrides=True,
        builds_models=False,
    ),
    "doctor": Command(
        "say what of this machine, or of all ranks, is fine, slow or broken", on_ranks=True, takes_overrides=True
    ),
    "serve": Command("run one SGLang server for trainers elsewhere, and keep it running", takes_overrides=True),
    "eval": Command("score a model on data.validation and data.validation_sets", on_ranks=True, takes_overrides=True),
    "export": Command("write a checkpoint of a run as a Hugging Face folder, or for Megatron-LM"),
    "data": Command("write GSM8K, MATH, DAPO or Countdown as configurations read them"),
    "settings": Command("explain a setting, a section, a metric, or a name from other trainers"),
    "completion": Command("print the script by which bash or zsh completes commands, options and settings"),
    "report": Command("show how a metric went in a run, or in several"),
    "inspect": Command("show samples that a run saved, token by token: mask, reward, value, return, advantage"),
}
"""Subcommands by name, which is also the name of the module in this package."""


def module_of(command: str) -> CommandModule:
    """The module of a subcommand, imported now."""
    return cast(CommandModule, import_module(f"{__name__}.{command}"))


def path_option(text: str) -> str:
    """A `type` of argparse for paths: `~` is expanded. Raises ArgumentTypeError for a variable in the path."""
    try:
        return expanded(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole_option(name: str, text: str, least: int, most: int) -> int:
    """The whole number that an option has. Raises ConfigError for anything else, and outside of the bounds."""
    number = whole_number(text)
    if number is None or not least <= number <= most:
        raise ConfigError(f"{name} is '{shortened(text)}', must be a whole number from {least} to {most}")
    return number


def ranks_option(name: str, text: str | None) -> int | None:
    """The number of devices or nodes that an option has; None where it is not given. Raises as `whole_option`."""
    from megappo.config.base import LARGEST_WORLD

    return None if text is None else whole_option(name, text, 1, LARGEST_WORLD)


def seconds_option(name: str, text: str, most: float) -> float:
    """The seconds that an option has, from 0. Raises ConfigError for anything else, and above `most`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= most:
        raise ConfigError(f"{name} is '{shortened(text)}', must be a number of seconds from 0 to {most:g}")
    return seconds


def add_config_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the arguments of a configuration and its overrides."""
    parser.add_argument("config", metavar="CONFIG", nargs="?" if optional else None, type=path_option, help="YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override such as run.steps=10, or another file"
    )


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the devices that a run is planned for."""
    parser.add_argument("--machine", metavar="NAME", help="h100, cpu, ... or a YAML file (default: by runtime.device)")
    parser.add_argument("--gpus", metavar="N", help="devices, one per rank (default: the fewest the layouts need)")
