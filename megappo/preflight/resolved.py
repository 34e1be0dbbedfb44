"""A run whose settings were checked against models, ranks and machine: what every command starts from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megappo.config import Config, ConfigError, Derived, check_run, derive, derive_run, resolve
from megappo.config.roles import LayoutSettings
from megappo.config.start_lines import training_line
from megappo.errors import RunError
from megappo.plan.planner import default_machine, fewest_ranks, models_beside, read_models
from megappo.runtime.launchers import read_ranks, read_world_size

if TYPE_CHECKING:
    from megappo.engines.protocol import EngineFactory
    from megappo.plan.inputs import Models, Setup
    from megappo.preflight.inputs import RunInputs
    from megappo.runtime.deadlines import Deadlines


def resolve_here(config: Config) -> Config:
    """The settings with what follows from this machine's device filled in."""
    if config.rollout.engine is not None:
        return config  # and torch, which takes seconds to import, is not asked
    from megappo.runtime import device

    return resolve(config, on_cuda=device.runs_on_cuda(config.runtime))


@dataclass(frozen=True)
class RunOutline:
    """A run that is looked at and not started: its settings, models and sizes."""

    config: Config
    models: Models
    derived: Derived


def outline_run(
    config: Config, config_path: str, *, world_size: int | None = None, on_cuda: bool | None = None
) -> RunOutline:
    """The run of a configuration file, on `world_size` ranks of a device, by its models' config.json alone.

    By default on as many ranks as were started, where these are several, or the fewest on which the layouts stand, of
    this machine's device. Models that are not on this machine are looked for beside the file. Raises ConfigError for
    settings that break a rule there.
    """
    config = resolve_here(config) if on_cuda is None else resolve(config, on_cuda=on_cuda)
    if world_size is None:
        started = read_world_size(os.environ)
        world_size = started if started > 1 else fewest_ranks(config, on_cuda=on_cuda is True)
    models = read_models(config, models_beside(config_path)).models
    return RunOutline(config, models, derive(config, world_size, models.actor, models.critic, models.reference))


@dataclass(frozen=True)
class ResolvedRun:
    """A run that may start."""

    config: Config
    """The settings, with what follows from this machine's device."""
    derived: Derived
    engine: EngineFactory
    deadlines: Deadlines
    rows: tuple[tuple[str, str], ...]
    """(name, what it is) of its plan on this machine, for the start of the log."""
    inputs: RunInputs | None
    """What the run reads, where it was read already as its epochs had to be counted."""


def resolve_run(command: Literal["train", "eval"], config: Config) -> ResolvedRun:
    """Check a configuration against models, the ranks that were started and this machine, before anything is built.

    Mistakes that no import of torch is needed for are refused before it. Raises ConfigError for settings, ValueError
    for data, RunError for software and devices that are not there.
    """
    world_size = read_world_size(os.environ)
    if command == "eval" and world_size == 1:
        config = _in_one_process(resolve_here(config))
    derived = _derived(command, config, world_size)  # refuses most mistakes before torch is imported
    resolved = resolve_here(config)
    from megappo.engines.registry import find_engine
    from megappo.plan.here import plan_start, this_machine
    from megappo.runtime.accelerations import find_accelerations
    from megappo.runtime.device import check_device

    find_accelerations(config.model.accelerations)  # hides broken libraries from Megatron-Core, before it is imported
    if resolved is not config:
        config, derived = resolved, _derived(command, resolved, world_size)
    check_device(config.runtime)  # before an engine for it is asked for
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
    from megappo.plan.shared_memory import room_problem, shared_buckets_bytes, socket_problem

    needed_bytes = shared_buckets_bytes(config, setup, world_size, read_ranks(os.environ).local_world_size)
    if needed_bytes:
        problem = room_problem(needed_bytes) or socket_problem(os.environ)
        if problem is not None:
            raise RunError(problem)


def _in_one_process(config: Config) -> Config:
    """Settings of an evaluation by one process alone: the engine inside it wants the whole model, whatever layouts the
    trained models have. Servers keep the layout that they are fed from."""
    if config.rollout.has_servers:
        return config
    given = {name: role.model_copy(update={"layout": LayoutSettings()}) for name, role in config.trained.items()}
    return config.model_copy(update=given)


def _derived(command: str, config: Config, world_size: int) -> Derived:
    """The run's numbers, but for steps that follow from its data. Raises ConfigError for settings that do not fit these
    ranks; for a single process the error says how many are needed."""
    try:
        return check_run(config, world_size)
    except ConfigError as error:
        if world_size > 1 or (fewest := fewest_ranks(config)) == 1:
            raise
        if not set(error.problems) - set(_problems(config, fewest)):
            raise  # more ranks would change nothing
        raise ConfigError(
            [
                *error.problems,
                f"this is 1 process, and the layouts need {fewest}; start {fewest} processes: "
                f"{training_line(*default_machine(config).nodes_of(fewest), [command, '...'])}",
            ]
        ) from None


def _problems(config: Config, world_size: int) -> tuple[str, ...]:
    try:
        check_run(config, world_size)
    except ConfigError as error:
        return error.problems
    return ()
