"""The plan of a run that is about to start, on the machine that it runs on."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megappo.config import Config, ConfigError
from megappo.plan.costs import step_costs, step_seconds
from megappo.plan.deadlines import planned_deadlines
from megappo.plan.engines import other_engine
from megappo.plan.inputs import Setup, make_setup
from megappo.plan.machines import ASSUMED, CPU_CORES, MACHINES, Machine
from megappo.plan.planner import read_models
from megappo.plan.sizes import model_sizes
from megappo.plan.stopping import stopping
from megappo.runtime.deadlines import Deadlines
from megappo.runtime.memory_limits import machine_bytes

_UNKNOWN = "h100"
"""The machine that stands for a GPU which is not in the table."""


def machine_like(device_name: str, memory_bytes: float) -> Machine:
    """The machine of the table that a device, as torch calls it, is most like, with the device's own memory."""
    alike = [
        machine
        for machine in MACHINES.values()
        if machine.is_cuda and re.search(rf"\b{machine.name.split('-')[0]}\b", device_name, re.IGNORECASE)
    ]
    nearest = min(alike or [MACHINES[_UNKNOWN]], key=lambda machine: abs(machine.memory_bytes - memory_bytes))
    return replace(nearest, memory_bytes=memory_bytes, summary=f"{device_name}, {memory_bytes / 1e9:.0f} GB")


def this_machine() -> Machine:
    """The machine of the planner's tables that is most like this one, with this one's memory and share of cores."""
    import torch

    from megappo.runtime.device import device_bytes

    if torch.cuda.is_available():
        return machine_like(torch.cuda.get_device_name(0), device_bytes())
    return this_cpu()


def this_cpu() -> Machine:
    """The CPU of the planner's tables with this machine's memory and share of cores."""
    total = machine_bytes()
    cores = len(os.sched_getaffinity(0))
    here = MACHINES["cpu"].scaled(min(1.0, cores / CPU_CORES))
    return replace(here, memory_bytes=total, summary=f"this machine's {cores} cores and {total / 1e9:.0f} GB")


@dataclass(frozen=True)
class StartPlan:
    """The plan's results for a run that is about to start."""

    deadlines: Deadlines
    rows: tuple[tuple[str, str], ...]
    """(name, what it is), for the start of the log."""
    setup: Setup
    """The run as the planner sees it."""


def plan_start(config: Config, world_size: int, machine: Machine) -> StartPlan:
    """The plan of a run whose settings break no rule on so many ranks of a machine.

    Raises ConfigError for what the attention that is installed here cannot do.
    """
    import torch  # takes seconds, which refused settings need not wait for

    from megappo.runtime.accelerations import find_accelerations

    models = read_models(config, None).models
    # Files of reward models and judges are looked at by what loads them, and take no part in a rollout.
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
    found = find_accelerations(config.model.accelerations).for_model(own_layers=models.actor.has_own_layers)
    if found.for_model(own_layers=False).uses_engine_layers(dtype):
        _check_windows(setup, found.engine.summary)
    stop = stopping(setup, stages, share, total)
    writing = stop.checkpoint_seconds  # also for the export: a rank writes what all of them hold of the actor
    models_bytes = math.fsum(model_sizes(role.arch)[0] * role.dtype_bytes for role in setup.roles)
    # A checkpoint, and all models, which each machine reads.
    reading = writing + models_bytes / ASSUMED.checkpoint_bytes_per_second
    phases = seconds | {"start": reading, "evaluate": rollout, "export": writing}
    phases["checkpoint"] = 2 * writing  # the one before it may still be written
    rows = (
        ("layers", found.sentence(dtype)),
        (
            "plan",
            f"{machine.summary}: a step of {total:.3g} seconds, {rollout:.3g} of them for the rollout, at full length",
        ),
        *((f"{r.name} pipeline", _layer_words(r.chunk_layers)) for r in setup.roles if r.chunk_layers is not None),
        ("other engine", other_engine(planned, models, machine, world_size).sentence),
        ("stopping", stop.sentence(config)),
    )
    return StartPlan(planned_deadlines(config, phases), rows, setup)


def _check_windows(setup: Setup, engine: str) -> None:
    """Refuse sliding windows under context parallelism: Transformer Engine's ring of keys and values does not support
    them."""
    for role in setup.roles:
        if role.grid.cp > 1 and role.arch.has_window and not role.arch.has_own_layers:
            name = "actor" if role.name == "reference" else role.name
            raise ConfigError(
                f"{name}.layout.context_parallel is {role.grid.cp} and the {role.name} model has a sliding window, "
                f"which {engine} has no ring for; set model.accelerations to torch, "
                f"or {name}.layout.context_parallel to 1"
            )


def _layer_words(chunk_layers: Sequence[int]) -> str:
    return f"chunks of {', '.join(map(str, chunk_layers))} layers"
