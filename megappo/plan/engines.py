"""The rollout's seconds with the engine that a configuration does not use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from megappo.config import Config, resolve
from megappo.config.engine import SGLangSettings
from megappo.config.rules.servers import server_rules
from megappo.config.schema import RolloutSettings
from megappo.plan.costs import rollout_cost
from megappo.plan.inputs import Models, make_setup, unserved
from megappo.plan.machines import Machine
from megappo.plan.memory import rank_memory
from megappo.plan.servers import cache_tokens

_NAMES = {"sglang": "SGLang", "transformers": "the embedded engine"}
_LARGEST_BATCH = 512
"""Largest batch that the embedded engine is tried with, in sequences; larger ones bring little."""
_ALIKE = 0.02
"""Rollouts whose seconds differ by less than this fraction count as equally fast."""


@dataclass(frozen=True)
class OtherEngine:
    """The fastest settings of the other engine that fit."""

    engine: str
    overrides: tuple[str, ...]
    """Overrides with which the configuration generates with the other engine; empty where nothing fits."""
    rollout_seconds: float | None
    """Seconds of the rollout with it; None where no settings of it fit."""
    sentence: str


def other_engine(config: Config, models: Models, machine: Machine, gpus: int) -> OtherEngine:
    """Plan the rollout with the engine that the configuration does not use on this machine."""
    config = resolve(config, on_cuda=machine.is_cuda)
    name = "transformers" if config.rollout.has_servers else "sglang"
    if config.rollout.load_from is not None:
        return OtherEngine(name, (), None, f"no engine is needed: samples are those of {config.rollout.load_from}")
    why = unserved(config, models.actor, on_cuda=machine.is_cuda)
    if why and name == "sglang":
        return OtherEngine(name, (), None, f"{_NAMES[name]} would not do: {why}")
    now = _rollout_seconds(config, models, machine, gpus)
    found = [
        (seconds, overrides)
        for rollout, overrides in _candidates(config, models, machine)
        if (seconds := _fitting_seconds(_with(config, rollout), models, machine, gpus)) is not None
    ]
    if not found:
        why = "holds a whole model on every rank" if name == "transformers" else "would stand beside the trainers"
        if name == "transformers" and not config.offloads:
            why += ", also while it trains; where a role has `offload` it leaves the device then"
        sentence = f"{_NAMES[name]} does not fit: it {why}"
        return OtherEngine(name, (), None, sentence)
    seconds, overrides = min(found)
    words = f"{_NAMES[name]} instead would take {seconds:.3g} seconds for the rollout, {_compare(seconds, now)}"
    return OtherEngine(name, overrides, seconds, f"{words}: {' '.join(overrides)}")


def _compare(other: float, now: float) -> str:
    if abs(other - now) < _ALIKE * now:
        return "as long as now"
    return f"{other / now:.2g} times as long" if other > now else f"{now / other:.2g} times faster"


def _with(config: Config, rollout: RolloutSettings) -> Config:
    return config.model_copy(update={"rollout": rollout})


def _candidates(config: Config, models: Models, machine: Machine) -> Iterator[tuple[RolloutSettings, tuple[str, ...]]]:
    """Settings of the other engine, with the overrides that make them: batches of the embedded one, servers' sizes."""
    given = config.rollout
    any_type = ("rollout.dtype=null",) if given.dtype is not None else ()  # SGLang has the actor's
    if given.has_servers:
        words = ["rollout.engine=transformers", *(["rollout.sglang=null"] if given.sglang is not None else [])]
        words += ["rollout.ahead=0"] if given.ahead else []
        words += ["rollout.max_lag=null"] if given.max_lag is not None else []
        plain = given.model_copy(update={"engine": "transformers", "sglang": None, "ahead": 0, "max_lag": None})
        for batch in (2**n for n in range(_LARGEST_BATCH.bit_length())):
            more = [f"rollout.generate_batch_sequences={batch}"] if batch != given.generate_batch_sequences else []
            yield plain.model_copy(update={"generate_batch_sequences": batch}), (*words, *more)
        return
    if not machine.is_cuda:
        yield given.model_copy(update={"engine": "sglang", "dtype": None}), ("rollout.engine=sglang", *any_type)
        return
    for tensor_parallel, tenths in itertools.product((1, 2, 4, 8), range(1, 9)):
        servers = SGLangSettings(tensor_parallel=tensor_parallel, memory_fraction=tenths / 10)
        rollout = given.model_copy(update={"engine": "sglang", "sglang": servers, "dtype": None})
        if tensor_parallel > machine.devices_per_node or any(server_rules(_with(config, rollout), models.actor)):
            continue
        sizes = [f"rollout.sglang.{key}={value:g}" for key, value in servers.model_dump(exclude_defaults=True).items()]
        yield rollout, ("rollout.engine=sglang", *any_type, *sizes)


def _rollout_seconds(config: Config, models: Models, machine: Machine, gpus: int) -> float:
    share = machine.per_rank(gpus)
    setup = make_setup(config, models, gpus, on_cuda=machine.is_cuda, device_bytes=share.memory_bytes)
    return rollout_cost(models.actor, setup.work, share).seconds


def _fitting_seconds(config: Config, models: Models, machine: Machine, gpus: int) -> float | None:
    """Seconds of the rollout; None where a rank has too little memory, or a server no room for the longest sequence."""
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
