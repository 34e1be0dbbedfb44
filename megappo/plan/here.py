"""Plan of a run at its start, for the current machine."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megappo.config import Config, ConfigError
from megappo.families.rope import has_own_layers
from megappo.plan.bytes.sizes import model_sizes
from megappo.plan.costs import step_costs, step_seconds
from megappo.plan.deadlines import planned_deadlines
from megappo.plan.engines import other_engine
from megappo.plan.hardware.machines import ASSUMED, CPU_CORES, MACHINES, Machine
from megappo.plan.inputs import Setup, make_setup
from megappo.plan.planner import read_models
from megappo.plan.stopping import stopping
from megappo.runtime.memory.memory_limits import machine_bytes
from megappo.runtime.watch.deadlines import Deadlines

_UNKNOWN = "h100"
"""Machine that represents a GPU that is not in the table."""


def machine_like(device_name: str, memory_bytes: float) -> Machine:
    """Return the machine of the table that is most similar to a device, with the memory of the device. `device_name`
    is the name in torch."""
    same_name = [
        machine
        for machine in MACHINES.values()
        if machine.is_cuda and re.search(rf"\b{machine.name.split('-')[0]}\b", device_name, re.IGNORECASE)
    ]
    nearest = min(same_name or [MACHINES[_UNKNOWN]], key=lambda machine: abs(machine.memory_bytes - memory_bytes))
    return replace(nearest, memory_bytes=memory_bytes, summary=f"{device_name}, {memory_bytes / 1e9:.0f} GB")


def this_machine() -> Machine:
    """Return the machine of the table that is most similar to this machine, with this machine's memory and share of
    cores."""
    import torch

    from megappo.runtime.device import device_bytes

    if torch.cuda.is_available():
        return machine_like(torch.cuda.get_device_name(0), device_bytes())
    return this_cpu()


def this_cpu() -> Machine:
    """Return the CPU of the table with this machine's memory and share of cores."""
    total = machine_bytes()
    cores = len(os.sched_getaffinity(0))
    machine = MACHINES["cpu"].scaled(min(1.0, cores / CPU_CORES))
    return replace(machine, memory_bytes=total, summary=f"this machine's {cores} cores and {total / 1e9:.0f} GB")


@dataclass(frozen=True)
class StartPlan:
    """Planned values of a run that is about to start."""

    deadlines: Deadlines
    rows: tuple[tuple[str, str], ...]
    """Pairs of a name and a text for the start of the log."""
    setup: Setup
    """The planner's view of the run."""


def plan_start(config: Config, world_size: int, machine: Machine) -> StartPlan:
    """Return the plan of a run with valid settings on `world_size` ranks of a machine.

    Raises ConfigError if the installed attention does not support the layout.
    """
    import torch  # takes seconds; a run with invalid settings skips this import

    from megappo.runtime.accelerations import find_accelerations

    models = read_models(config, None).models
    # The files of reward models and judges are read by their loaders and have no part in a rollout.
    reward = config.reward.model_copy(
        update={"model_path": None, "model_server": None, "model_remote": None, "judge": None, "functions": {}}
    )
    planned = config.model_copy(update={"reward": reward})
    share = machine.per_rank(world_size)
    setup = make_setup(planned, models, world_size, on_cuda=machine.is_cuda, device_bytes=share.memory_bytes)
    stages = step_costs(setup, share)
    seconds = {stage.name: stage.seconds for stage in stages}
    rollout = seconds["rollout"]
    total = step_seconds(stages, setup.work.servers)
    dtype = getattr(torch, config.model.dtype)
    accelerations = find_accelerations(config.model.accelerations).for_model(own_layers=has_own_layers(models.actor))
    if accelerations.for_model(own_layers=False).uses_engine_layers(dtype):
        _check_windows(setup, accelerations.engine.summary)
    stop = stopping(setup, stages, share, total)
    writing = stop.checkpoint_seconds  # also for the export, where one rank writes the whole actor
    models_bytes = math.fsum(model_sizes(role.arch)[0] * role.dtype_bytes for role in setup.roles)
    # Each machine reads a checkpoint and all models.
    reading = writing + models_bytes / ASSUMED.checkpoint_bytes_per_second
    phases = seconds | {"start": reading, "evaluate": rollout, "export": writing}
    phases["checkpoint"] = 2 * writing  # the previous checkpoint may still be in progress
    rows = (
        ("layers", accelerations.sentence(dtype)),
        (
            "plan",
            f"{machine.summary}: a step takes {total:.3g} seconds, and its rollout {rollout:.3g}, with all responses "
            "at the maximum length",
        ),
        *((f"{r.name} pipeline", _format_layers(r.chunk_layers)) for r in setup.roles if r.chunk_layers is not None),
        ("other engine", other_engine(planned, models, machine, world_size).sentence),
        ("stopping", stop.sentence(config)),
    )
    return StartPlan(planned_deadlines(config, phases), rows, setup)


def _check_windows(setup: Setup, engine: str) -> None:
    """Check that no role has sliding windows with context parallelism. The ring attention of Transformer Engine does
    not support sliding windows.

    Raises ConfigError if a role has both.
    """
    for role in setup.roles:
        if role.grid.cp > 1 and role.arch.has_window and not has_own_layers(role.arch):
            name = "actor" if role.name == "reference" else role.name
            raise ConfigError(
                f"{name}.layout.context_parallel is {role.grid.cp} and the {role.name} model has a sliding window, "
                f"for which {engine} has no ring attention; set model.accelerations to torch, "
                f"or {name}.layout.context_parallel to 1"
            )


def _format_layers(chunk_layers: Sequence[int]) -> str:
    return f"chunks of {', '.join(map(str, chunk_layers))} layers"
