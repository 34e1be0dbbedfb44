"""The plan of a run that is about to start, on the machine that it runs on, and the deadlines that follow from it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megappo.config import Config, ConfigError, resolve
from megappo.config.engine import LEAST_REQUEST_SECONDS
from megappo.config.schema import PHASES, RuntimeSettings
from megappo.plan.costs import step_costs, step_seconds
from megappo.plan.engines import other_engine
from megappo.plan.inputs import Setup, make_setup
from megappo.plan.machines import ASSUMED, CPU_CORES, MACHINES, Machine
from megappo.plan.planner import read_models
from megappo.plan.sizes import model_sizes
from megappo.plan.stopping import stopping

_OTHER_START_SECONDS = 300.0
"""Seconds of a start besides reading weights: importing libraries, the first compilations, making process groups."""
PLANNED_TIMES = 4.0
"""A phase may last so many times its planned seconds before the watchdog ends it, and a request of a rollout before its
server is asked whether it still makes tokens. Runs that were compared took 0.9 to 1.8 times their planned seconds
(benchmarks/results/2026-11-21-plan-published.md)."""
WATCHED_COLLECTIVE_SECONDS = 7 * 24 * 3600
"""Timeout of collectives where the watchdog ends what hangs: a week, so that it always comes later than the
watchdog."""
_MOST_SECONDS = 1e6
"""The largest value that a setting of seconds may have."""
_UNKNOWN = "h100"
"""The machine that stands for a GPU which is not in the table."""


def resolve_here(config: Config) -> Config:
    """The settings with what follows from this machine's device filled in."""
    if config.rollout.engine is not None:
        return config  # and torch, which takes seconds to import, is not asked
    from megappo.runtime import device

    return resolve(config, on_cuda=device.runs_on_cuda(config.runtime))


def machine_like(device_name: str, memory_bytes: float) -> Machine:
    """The machine of the table that a device, as torch calls it, is most like, with the device's own memory."""
    alike = [
        machine
        for machine in MACHINES.values()
        if machine.is_cuda and re.search(rf"\b{machine.name.split('-')[0]}\b", device_name, re.IGNORECASE)
    ]
    nearest = min(alike or [MACHINES[_UNKNOWN]], key=lambda machine: abs(machine.memory_bytes - memory_bytes))
    return replace(nearest, memory_bytes=memory_bytes, words=f"{device_name}, {memory_bytes / 1e9:.0f} GB")


def this_machine() -> Machine:
    """The machine of the planner's tables that is most like this one, with this one's memory and share of cores."""
    import torch

    from megappo.runtime.device import device_bytes

    if torch.cuda.is_available():
        return machine_like(torch.cuda.get_device_name(0), device_bytes())
    return this_cpu()


def this_cpu() -> Machine:
    """The CPU of the planner's tables with this machine's memory and share of cores."""
    import psutil

    total = float(psutil.virtual_memory().total)
    cores = len(os.sched_getaffinity(0))
    here = MACHINES["cpu"].scaled(min(1.0, cores / CPU_CORES))
    return replace(here, memory_bytes=total, words=f"this machine's {cores} cores and {total / 1e9:.0f} GB")


@dataclass(frozen=True)
class Outlook:
    """The plan's results for a run that is about to start."""

    config: Config
    """Settings of the run, with the deadlines that follow from the plan."""
    rows: tuple[tuple[str, str], ...]
    """(name, what it is), for the start of the log."""


def outlook(config: Config, world_size: int, machine: Machine) -> Outlook:
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
        _check_windows(setup, found.engine.words)
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
            f"{machine.words}: a step of {total:.3g} seconds, {rollout:.3g} of them for the rollout, at full length",
        ),
        *((f"{r.name} pipeline", _layer_words(r.chunk_layers)) for r in setup.roles if r.chunk_layers is not None),
        ("other engine", other_engine(planned, models, machine, world_size).sentence),
        ("stopping", stop.sentence(config)),
    )
    return Outlook(with_deadlines(config, phases), rows)


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


def with_deadlines(config: Config, planned_seconds: Mapping[str, float]) -> Config:
    """The settings with the deadlines that were not given: from the planned seconds of each phase, the rollout among
    them, and from how long the run's servers may take to start.

    Raises ConfigError where a collective that was given a timeout would fail in a phase that may last longer.
    """
    slow = {name: PLANNED_TIMES * seconds for name, seconds in planned_seconds.items()}
    slow["start"] = slow.get("start", 0.0) + _OTHER_START_SECONDS + _servers_start_seconds(config)
    slow = {name: min(seconds, _MOST_SECONDS) for name, seconds in slow.items()}
    runtime, rollout = config.runtime, config.rollout
    limit = runtime.phase_timeout_seconds
    if limit is not None and "phase_timeout_seconds" not in runtime.model_fields_set:
        limits = {name: seconds for name, seconds in slow.items() if name in PHASES and seconds > limit}
        if limits:
            limits |= runtime.phase_timeouts_seconds
            runtime = runtime.model_copy(update={"phase_timeouts_seconds": limits})
    if limit is not None:
        runtime = _with_collectives_that_outlast(runtime, limit)
    if rollout.has_servers and rollout.servers.request_timeout_seconds is None:
        seconds = max(slow["rollout"], LEAST_REQUEST_SECONDS)
        servers = rollout.servers.model_copy(update={"request_timeout_seconds": seconds})
        rollout = rollout.model_copy(update={"sglang": servers})
    return config.model_copy(update={"runtime": runtime, "rollout": rollout})


def _servers_start_seconds(config: Config) -> float:
    """Longest seconds until the run's own servers answer, started one after the other; each reports itself when it does
    not."""
    own = [judge.server for judge in config.reward.judges.values()] + [config.reward.model_server]
    of_rewards = math.fsum(server.start_timeout_seconds for server in own if server is not None)
    return of_rewards + (config.rollout.servers.start_timeout_seconds if config.rollout.has_servers else 0.0)


def _with_collectives_that_outlast(runtime: RuntimeSettings, limit: float) -> RuntimeSettings:
    """Make collectives outlast the watchdog's limits. Only the watchdog decides what lasts too long: it sees tokens and
    minibatches arrive, which a collective does not."""
    if "collective_timeout_seconds" not in runtime.model_fields_set:
        return runtime.model_copy(update={"collective_timeout_seconds": WATCHED_COLLECTIVE_SECONDS})
    name, longest = max(runtime.phase_timeouts_seconds.items(), key=lambda item: item[1], default=("step", 0.0))
    name, longest = (name, longest) if longest > limit else ("of a step", limit)
    if runtime.collective_timeout_seconds <= longest:
        raise ConfigError(
            f"runtime.collective_timeout_seconds is {runtime.collective_timeout_seconds}, but a phase ({name}) may "
            f"last {longest:g} seconds, in which other ranks wait; set it above, or remove it"
        )
    return runtime
