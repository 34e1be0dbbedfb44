"""`megappo train`: run PPO, look at everything but training (`--dry-run`), or repeat a refused update (`--replay`)."""

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
    """What follows `megappo train`."""
    parser.add_argument(
        "--dry-run", action="store_true", help="check the whole run in one process without a GPU, and do not train"
    )
    parser.add_argument(
        "--replay", metavar="FOLDER", type=path_option, help="repeat an update that was refused as not finite, instead"
    )
    parser.add_argument(
        "--profile", metavar="STEPS", help="trace these steps, such as 3 or 3,5-7, and say where their time goes"
    )
    parser.add_argument(
        "--critic-only",
        action="store_true",
        help="value pretraining: train the critic alone, on what another run saved (rollout.load_from)",
    )
    add_machine_arguments(parser)
    add_config_arguments(parser, optional=True)


def run(arguments: argparse.Namespace) -> None:
    """`megappo train`. Raises ConfigError where arguments contradict each other."""
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
    """Handle a scheduler's SIGUSR1 before the run handles signals itself: nothing is to be saved yet, so end and be
    requeued."""
    os._exit(REQUEUE)


def _critic_only(config: Config) -> list[str]:
    """Overrides that train the critic alone: without an engine nothing can be evaluated, and the actor does not
    change."""
    if config.critic is None:
        raise ConfigError("--critic-only trains the critic, and there is none; add the section critic")
    own = [] if config.critic.pretraining is not None else ["critic.pretraining={}"]
    return [*own, "evaluation=null", "run.export_final_model=false"]


def _steps(text: str) -> list[int]:
    """Numbers and ranges of numbers. Raises ConfigError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = [whole_option("--profile", end, 1, 2**31 - 1) for end in (first, last if dash else first)]
        if ends[1] - ends[0] not in range(_MOST_TRACED):
            raise ConfigError(
                f"--profile {shortened(part)} is no range of at most {_MOST_TRACED} steps; write 3-5, say"
            )
        found += range(ends[0], ends[1] + 1)
    return found


def _refuse_lost_run(config: Config) -> None:
    from megappo.checkpoint.files import checkpoints_directory
    from megappo.ppo.start import lost_steps

    if not any(checkpoints_directory(config.run.path).glob("*/checkpoint.json")):
        problem, _ = lost_steps(config)
        if problem is not None:
            raise ConfigError(problem)
