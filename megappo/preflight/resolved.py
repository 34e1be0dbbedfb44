"""Runs whose settings were checked against models, ranks and the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megappo.config import Config, ConfigError, Derived, check_run, derive, derive_run, resolve
from megappo.config.sections.roles import LayoutSettings
from megappo.config.start_lines import training_line
from megappo.errors import RunError
from megappo.plan.planner import default_machine, fewest_ranks, local_models_folder, read_models
from megappo.runtime.launchers import read_ranks, read_world_size

if TYPE_CHECKING:
    from megappo.engines.protocol import EngineFactory
    from megappo.plan.inputs import Models, Setup
    from megappo.preflight.inputs import RunInputs
    from megappo.runtime.watch.deadlines import Deadlines


def resolve_for_device(config: Config) -> Config:
    """Return the settings with the values that follow from this machine's device."""
    if config.rollout.engine_name is not None:
        return config  # without the import of torch, which takes seconds
    from megappo.runtime import device

    return resolve(config, on_cuda=device.runs_on_cuda(config.runtime))


def _prepare_import(config: Config) -> None:
    """Hide broken libraries from Megatron-Core before a custom engine is imported for its capabilities."""
    if config.rollout.is_custom:
        from megappo.runtime.accelerations import find_accelerations

        find_accelerations(config.model.accelerations)


@dataclass(frozen=True)
class RunOutline:
    """Settings, models and sizes of a run that is not started."""

    config: Config
    models: Models
    derived: Derived


def outline_run(
    config: Config, config_path: str, *, world_size: int | None = None, on_cuda: bool | None = None
) -> RunOutline:
    """Return the run of a configuration file, based only on the config.json of its models.

    Args:
        config: settings of the run.
        config_path: configuration file. Models that are missing on this machine are searched next to the file.
        world_size: number of ranks; None: the number of started ranks if several were started, otherwise the smallest
            number that the layouts allow.
        on_cuda: whether the ranks have CUDA devices; None: the device of this machine.

    Raises ConfigError for settings that violate a rule.
    """
    _prepare_import(config)
    config = resolve_for_device(config) if on_cuda is None else resolve(config, on_cuda=on_cuda)
    if world_size is None:
        started = read_world_size(os.environ)
        world_size = started if started > 1 else fewest_ranks(config, on_cuda=on_cuda is True)
    models = read_models(config, local_models_folder(config_path)).models
    return RunOutline(config, models, derive(config, world_size, models.actor, models.critic, models.reference))


@dataclass(frozen=True)
class ResolvedRun:
    """Run that is ready to start."""

    config: Config
    """Settings with the values that follow from this machine's device."""
    derived: Derived
    engine: EngineFactory
    deadlines: Deadlines
    rows: tuple[tuple[str, str], ...]
    """(name, description) pairs of the run's plan on this machine, for the start of the log."""
    inputs: RunInputs | None
    """Inputs of the run. None unless `run.epochs` required the number of prompts."""


def resolve_run(command: Literal["train", "eval"], config: Config) -> ResolvedRun:
    """Check a configuration against models, started ranks and this machine, before anything is built.

    Errors that need no import of torch are raised before the import.

    Raises ConfigError for settings, ValueError for data, and RunError for missing software and devices.
    """
    world_size = read_world_size(os.environ)
    _prepare_import(config)
    if command == "eval" and world_size == 1:
        config = _in_one_process(resolve_for_device(config))
    derived = _derived(command, config, world_size)  # finds most errors before torch is imported
    resolved = resolve_for_device(config)
    from megappo.engines.registry import find_engine
    from megappo.plan.here import plan_start, this_machine
    from megappo.runtime.accelerations import find_accelerations
    from megappo.runtime.device import check_device

    find_accelerations(config.model.accelerations)  # hides broken libraries from Megatron-Core, before it is imported
    if resolved is not config:
        config, derived = resolved, _derived(command, resolved, world_size)
    check_device(config.runtime)  # before an engine is requested for the device
    engine, inputs = find_engine(config.rollout), None
    if config.run.epochs is not None:
        from megappo.preflight.inputs import read_inputs
        from megappo.preflight.template_time import with_template_time

        config = with_template_time(config) if command == "train" else config
        inputs = read_inputs(config, training=command == "train")
        derived = derive_run(config, world_size, len(inputs.training))
    plan = plan_start(config, world_size, this_machine())
    _check_shared_memory(config, plan.setup, world_size)
    return ResolvedRun(config, derived, engine, plan.deadlines, plan.rows, inputs)


def _check_shared_memory(config: Config, setup: Setup, world_size: int) -> None:
    """Raise RunError if this machine has no room or no sockets for the buckets of the weight stream."""
    from megappo.plan.bytes.shared_memory import room_problem, shared_buckets_bytes, socket_problem

    needed_bytes = shared_buckets_bytes(config, setup, world_size, read_ranks(os.environ).local_world_size)
    if needed_bytes:
        problem = room_problem(needed_bytes) or socket_problem(os.environ)
        if problem is not None:
            raise RunError(problem)


def _in_one_process(config: Config) -> Config:
    """Return the settings for an evaluation in one process.

    The embedded engine needs the whole model, so the layouts of the trained models are replaced. Servers keep the
    layout, because their weights are sent from this layout.
    """
    if config.rollout.capabilities.separate_processes:
        return config
    single_rank_layouts = {
        name: role.model_copy(update={"layout": LayoutSettings()}) for name, role in config.trained.items()
    }
    return config.model_copy(update=single_rank_layouts)


def _derived(command: str, config: Config, world_size: int) -> Derived:
    """Compute the run's numbers, except steps that depend on the data.

    Raises ConfigError for settings that do not fit the ranks. For a single process, the error contains the number of
    required processes.
    """
    try:
        return check_run(config, world_size)
    except ConfigError as error:
        if world_size > 1 or (fewest := fewest_ranks(config)) == 1:
            raise
        if not set(error.problems) - set(_problems(config, fewest)):
            raise  # more ranks would not help
        raise ConfigError(
            [
                *error.problems,
                f"this is 1 process, but the layouts need {fewest}; start {fewest} processes: "
                f"{training_line(*default_machine(config).nodes_of(fewest), [command, '...'])}",
            ]
        ) from None


def _problems(config: Config, world_size: int) -> tuple[str, ...]:
    try:
        check_run(config, world_size)
    except ConfigError as error:
        return error.problems
    return ()
