"""The start of a run or an evaluation: settings are checked against models, ranks and machine before anything else."""

from __future__ import annotations

import os
from typing import Literal

from megappo.config import (
    Config,
    ConfigError,
    check_run,
    derive_run,
    describe_evaluation,
    print_rows,
    print_table,
)
from megappo.config.roles import LayoutSettings
from megappo.runtime.launchers import is_main, read_world_size


def start(command: Literal["train", "eval"], config: Config) -> dict[str, float]:
    """Fill in what follows from this machine, check against the ranks, show the run and begin it; gives the metrics of
    an evaluation."""
    from megappo.engines.registry import find_engine
    from megappo.plan.here import outlook, resolve_here, this_machine
    from megappo.runtime.accelerations import find_accelerations
    from megappo.runtime.device import check_device

    world_size, prompts = read_world_size(os.environ), None
    if command == "eval" and world_size == 1:
        config = _in_one_process(resolve_here(config))
    _check(command, config, world_size)  # refuses most mistakes before torch is imported
    config = resolve_here(config)
    find_accelerations(config.model.accelerations)  # hides broken libraries from Megatron-Core, before it is imported
    _check(command, config, world_size)  # and the rest before the data are tokenised
    check_device(config.runtime)  # before an engine for it is asked for
    find_engine(config.rollout)
    if config.run.epochs is not None:
        from megappo.ppo.parts import training_prompts
        from megappo.ppo.start import with_template_time

        config = with_template_time(config) if command == "train" else config
        prompts = training_prompts(config)
    derived = derive_run(config, world_size, None if prompts is None else len(prompts))
    found = outlook(config, world_size, this_machine())
    config = found.config
    if is_main(os.environ) and config.logging.console != "quiet":
        if command == "train":
            print_table(config, derived, more=found.rows)
        else:
            print_rows(describe_evaluation(config, derived))
    if command == "train":
        from megappo.ppo.run import train

        train(config, derived, prompts)
        return {}
    from megappo.ppo.run import evaluate

    return evaluate(config, derived, prompts)


def _in_one_process(config: Config) -> Config:
    """Settings of an evaluation by one process alone: the engine inside it wants the whole model, whatever layouts the
    trained models have. Servers keep the layout that they are fed from."""
    if config.rollout.has_servers:
        return config
    given = {name: role.model_copy(update={"layout": LayoutSettings()}) for name, role in config.trained.items()}
    return config.model_copy(update=given)


def _check(command: str, config: Config, world_size: int) -> None:
    """Raise ConfigError for settings that do not fit these ranks; for a single process the error says how many are
    needed."""
    try:
        check_run(config, world_size)
    except ConfigError as error:
        from megappo.plan.planner import fewest_ranks

        if world_size > 1 or (fewest := fewest_ranks(config)) == 1:
            raise
        if not set(error.problems) - set(_problems(config, fewest)):
            raise  # more ranks would change nothing
        raise ConfigError(
            [
                *error.problems,
                f"this is 1 process, and the layouts stand on {fewest}; start under torchrun with {fewest}: "
                f"torchrun --nproc-per-node {fewest} -m megappo {command} ...",
            ]
        ) from None


def _problems(config: Config, world_size: int) -> tuple[str, ...]:
    try:
        check_run(config, world_size)
    except ConfigError as error:
        return error.problems
    return ()
