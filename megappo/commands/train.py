"""`megappo train`: run PPO, check a run without training (`--dry-run`), or repeat a rejected update (`--replay`)."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from types import FrameType

from megappo.api.functions import train
from megappo.commands import add_config_arguments, add_machine_arguments, path_option, whole_option
from megappo.config import Config, ConfigError, load_config
from megappo.errors import REQUEUE, shortened
from megappo.runtime.launchers import may_print, read_world_size

_MOST_TRACED = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megappo train`."""
    parser.add_argument(
        "--dry-run", action="store_true", help="check the whole run in one process without a GPU, and do not train"
    )
    parser.add_argument(
        "--replay", metavar="FOLDER", type=path_option, help="only repeat an update that was rejected as not finite"
    )
    parser.add_argument(
        "--profile", metavar="STEPS", help="trace these steps, such as 3 or 3,5-7, and report how their time is spent"
    )
    parser.add_argument(
        "--critic-only",
        action="store_true",
        help="value pretraining: train only the critic on samples that another run saved (rollout.load_from)",
    )
    add_machine_arguments(parser)
    add_config_arguments(parser, optional=True)


def run(arguments: argparse.Namespace) -> None:
    """Train. Raises ConfigError for contradictory arguments."""
    if not arguments.dry_run and (arguments.machine or arguments.gpus):
        raise ConfigError(
            "--machine and --gpus are for plan and for train --dry-run; torchrun sets the processes of a run"
        )
    others = arguments.overrides or arguments.profile is not None or arguments.critic_only
    if (arguments.config is None) == (arguments.replay is None) or (arguments.replay is not None and others):
        raise ConfigError("train needs CONFIG, or --replay FOLDER alone, which holds its settings")
    if arguments.replay is not None:
        from megappo.ppo.replay import replay

        replay(arguments.replay, read_world_size(os.environ))
        return
    if not arguments.dry_run and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, _start_again)
    traced = [] if arguments.profile is None else [f"logging.profile_steps={_steps(arguments.profile)}"]
    overrides = [*arguments.overrides, *traced]
    config = load_config(arguments.config, overrides)
    if arguments.critic_only:
        config = load_config(arguments.config, [*overrides, *_critic_only(config)])
    if not arguments.dry_run:
        train(config)
    elif may_print(os.environ):
        from megappo.commands.dry_run import dry_run

        _refuse_lost_run(config)
        gpus, machine = arguments.gpus, arguments.machine
        dry_run(config, arguments.config, arguments.overrides, gpus_text=gpus, machine_name=machine)


def _start_again(_number: int, _frame: FrameType | None) -> None:
    """Handle a scheduler's SIGUSR1 before the run installs its own handlers. No state needs to be saved, so the process
    exits and is requeued."""
    os._exit(REQUEUE)


def _critic_only(config: Config) -> list[str]:
    """Return overrides that train only the critic. Evaluation needs an engine, and the actor does not change."""
    if config.critic is None:
        raise ConfigError("--critic-only trains the critic, but there is none; add the section critic")
    own = [] if config.critic.pretraining is not None else ["critic.pretraining={}"]
    return [*own, "evaluation=null", "run.export_final_model=false"]


def _steps(text: str) -> list[int]:
    """Parse step numbers and ranges. Raises ConfigError for other text."""
    steps: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = [whole_option("--profile", end, 1, 2**31 - 1) for end in (first, last if dash else first)]
        if ends[1] - ends[0] not in range(_MOST_TRACED):
            raise ConfigError(
                f"--profile {shortened(part)} is no range of at most {_MOST_TRACED} steps; write a range such as 3-5"
            )
        steps += range(ends[0], ends[1] + 1)
    return steps


def _refuse_lost_run(config: Config) -> None:
    from megappo.checkpoint.files import checkpoints_directory
    from megappo.ppo.assembly.start import lost_steps

    if not any(checkpoints_directory(config.run.path).glob("*/checkpoint.json")):
        problem, _ = lost_steps(config)
        if problem is not None:
            raise ConfigError(problem)
