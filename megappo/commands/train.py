"""`megappo train`: run PPO, look at everything but training (`--dry-run`), or repeat a refused update (`--replay`)."""

from __future__ import annotations

import argparse
import os

from megappo.commands import add_config_arguments, add_machine_arguments
from megappo.commands.start import start
from megappo.config import Config, ConfigError, load_config
from megappo.runtime.launchers import is_main, read_world_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What follows `megappo train`."""
    parser.add_argument("--dry-run", action="store_true", help="do everything but train, in one process without a GPU")
    parser.add_argument("--replay", metavar="FOLDER", help="repeat an update that was refused as not finite, instead")
    add_machine_arguments(parser)
    add_config_arguments(parser, optional=True)


def run(arguments: argparse.Namespace) -> None:
    """`megappo train`. Raises ConfigError where arguments contradict each other."""
    if not arguments.dry_run and (arguments.machine or arguments.gpus):
        raise ConfigError(
            "--machine and --gpus are for plan and for train --dry-run; torchrun sets the processes of a run"
        )
    given = [arguments.config is not None, bool(arguments.overrides)]
    if any(given) if arguments.replay is not None else not given[0]:
        raise ConfigError("train needs CONFIG, or --replay FOLDER alone, which holds its settings")
    if arguments.replay is not None:
        from megappo.ppo.replay import replay

        replay(arguments.replay, read_world_size(os.environ))
        return
    config = load_config(arguments.config, arguments.overrides)
    if not arguments.dry_run:
        start("train", config)
    elif is_main(os.environ):
        from megappo.commands.dry_run import dry_run

        _refuse_lost_run(config)
        gpus, machine = arguments.gpus, arguments.machine
        dry_run(config, arguments.config, arguments.overrides, gpus_text=gpus, machine_name=machine)


def _refuse_lost_run(config: Config) -> None:
    from megappo.ppo.start import checkpoints_directory, lost_steps

    if not any(checkpoints_directory(config).glob("*/checkpoint.json")):
        problem, _ = lost_steps(config)
        if problem is not None:
            raise ConfigError(problem)
