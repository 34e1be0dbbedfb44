"""How a run and an evaluation begin: settings are checked against models, ranks and machine before anything else."""

from __future__ import annotations

import os
from typing import Literal

from megappo.config import Config, check_run, derive_run, print_table
from megappo.runtime.launchers import is_main, read_world_size


def start(command: Literal["train", "eval"], config: Config) -> None:
    """Fill in what follows from this machine, check against the ranks, show the run and begin it."""
    from megappo.engines.registry import find_engine
    from megappo.plan.here import outlook, resolve_here, this_machine
    from megappo.runtime.accelerations import find_accelerations

    world_size, prompts = read_world_size(os.environ), None
    check_run(config, world_size)  # refuses most mistakes before torch is imported
    config = resolve_here(config)
    find_accelerations(config.model.accelerations)  # before anything imports Megatron-Core
    check_run(config, world_size)  # and the rest before the data are tokenised
    find_engine(config.rollout)
    if config.run.epochs is not None:
        from megappo.ppo.parts import training_prompts

        prompts = training_prompts(config)
    derived = derive_run(config, world_size, None if prompts is None else len(prompts))
    found = outlook(config, world_size, this_machine())
    config = found.config
    if is_main(os.environ) and config.logging.console != "quiet":
        # An evaluation has no steps and writes no checkpoints.
        print_table(config, derived, more=found.rows if command == "train" else ())
    if command == "train":
        from megappo.ppo.run import train

        train(config, derived, prompts)
    else:
        from megappo.ppo.run import evaluate

        evaluate(config, derived, prompts)
