"""Rollout time with the engine that a configuration does not use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from megappo.config import Config, resolve
from megappo.config.rollout import RolloutSettings
from megappo.config.rules.servers import server_rules
from megappo.config.sections.engine import DEFAULT_ENGINE, DEFAULT_SERVERS, ENGINES, ServerSettings
from megappo.plan.bytes.memory import rank_memory
from megappo.plan.bytes.servers import cache_tokens
from megappo.plan.costs import rollout_cost
from megappo.plan.hardware.machines import Machine
from megappo.plan.inputs import Models, make_setup, unserved

_LARGEST_BATCH = 512
"""Largest batch in sequences that is tried for the embedded engine. Larger batches are hardly faster."""
_ALIKE = 0.02
"""Relative difference below which two rollout times count as equal."""


@dataclass(frozen=True)
class OtherEngine:
    """The fastest settings of the other engine that fit."""

    engine: str
    overrides: tuple[str, ...]
    """Overrides that switch the configuration to the other engine; empty if no settings fit."""
    rollout_seconds: float | None
    """Seconds of the rollout with the other engine; None if no settings fit."""
    sentence: str


def other_engine(config: Config, models: Models, machine: Machine, gpus: int) -> OtherEngine:
    """Plan the rollout with the engine that the configuration does not use on this machine."""
    user, config = config.rollout, resolve(config, on_cuda=machine.is_cuda)
    is_embedded = config.rollout.capabilities.separate_processes
    name = DEFAULT_ENGINE if is_embedded else DEFAULT_SERVERS
    label = ENGINES[name].label
    if config.rollout.load_from is not None:
        return OtherEngine(name, (), None, f"no engine is needed: samples are loaded from {config.rollout.load_from}")
    why = unserved(config, models.actor, on_cuda=machine.is_cuda)
    if why and not is_embedded:
        return OtherEngine(name, (), None, f"{label} is not possible: {why}")
    now = _rollout_seconds(config, models, machine, gpus)
    fitting = [
        (seconds, overrides)
        for rollout, overrides in _candidates(config, user, models, machine)
        if (seconds := _fitting_seconds(_with(config, rollout), models, machine, gpus)) is not None
    ]
    if not fitting:
        why = "keeps a whole model on every rank" if is_embedded else "shares devices with the trainers"
        if is_embedded and not config.offloads:
            why += ", also during training; with `offload` of a role, the engine leaves the device during training"
        return OtherEngine(name, (), None, f"{label} does not fit: the engine {why}")
    seconds, overrides = min(fitting)
    summary = f"with {label}, the rollout would take {seconds:.3g} seconds, {_compare(seconds, now)}"
    return OtherEngine(name, overrides, seconds, f"{summary}: {' '.join(overrides)}")


def _compare(other: float, now: float) -> str:
    if abs(other - now) < _ALIKE * now:
        return "the same time as now"
    return f"{other / now:.2g} times as long" if other > now else f"{now / other:.2g} times faster"


def _with(config: Config, rollout: RolloutSettings) -> Config:
    return config.model_copy(update={"rollout": rollout})


def _candidates(
    config: Config, user: RolloutSettings, models: Models, machine: Machine
) -> Iterator[tuple[RolloutSettings, tuple[str, ...]]]:
    """Return settings of the other engine with their overrides: batch sizes for the embedded engine, or sizes of
    servers. `user` contains the settings before `resolve`, which the overrides replace."""
    base = config.rollout
    if base.capabilities.separate_processes:
        overrides = [f"rollout.engine={DEFAULT_ENGINE}", *(["rollout.servers=null"] if user.servers else [])]
        overrides += ["rollout.ahead=0"] if base.ahead else []
        overrides += ["rollout.max_lag=null"] if base.max_lag is not None else []
        embedded = base.model_copy(update={"engine": DEFAULT_ENGINE, "servers": None, "ahead": 0, "max_lag": None})
        for batch in (2**n for n in range(_LARGEST_BATCH.bit_length())):
            more = [f"rollout.generate_batch_sequences={batch}"] if batch != base.generate_batch_sequences else []
            yield embedded.model_copy(update={"generate_batch_sequences": batch}), (*overrides, *more)
        return
    nulls = [f"rollout.{name}=null" for name in ("engine", "dtype") if getattr(user, name) is not None]
    kind = (*nulls, f"rollout.servers.kind={DEFAULT_SERVERS}")  # servers use the actor's dtype
    base = base.model_copy(update={"engine": None, "servers": ServerSettings(), "dtype": None})
    if not machine.is_cuda:
        yield base, kind
        return
    for tensor_parallel, tenths in itertools.product((1, 2, 4, 8), range(1, 9)):
        servers = ServerSettings(tensor_parallel=tensor_parallel, memory_fraction=tenths / 10)
        rollout = base.model_copy(update={"servers": servers})
        if tensor_parallel > machine.devices_per_node or any(server_rules(_with(config, rollout), models.actor)):
            continue
        sizes = [f"rollout.servers.{key}={value:g}" for key, value in servers.model_dump(exclude_defaults=True).items()]
        yield rollout, (*kind, *sizes)


def _rollout_seconds(config: Config, models: Models, machine: Machine, gpus: int) -> float:
    share = machine.per_rank(gpus)
    setup = make_setup(config, models, gpus, on_cuda=machine.is_cuda, device_bytes=share.memory_bytes)
    return rollout_cost(models.actor, setup.work, share).seconds


def _fitting_seconds(config: Config, models: Models, machine: Machine, gpus: int) -> float | None:
    """Return the seconds of the rollout. Return None if a rank has too little memory or if a server has no room for
    the longest sequence."""
    share = machine.per_rank(gpus)
    setup = make_setup(config, models, gpus, on_cuda=machine.is_cuda, device_bytes=share.memory_bytes)
    work = setup.work
    if work.servers is not None:
        if work.servers.ranks > gpus and machine.is_cuda:
            return None
        if cache_tokens(models.actor, work.servers, work.engine_dtype_bytes) < work.cache_tokens:
            return None
    if max(ranks.peak for ranks in rank_memory(setup)) > share.usable_bytes:
        return None
    return rollout_cost(models.actor, work, share).seconds
