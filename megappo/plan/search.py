"""Layouts that fit: the one nearest to a configuration's, and the fastest ones for a number of devices.

The search goes over TP, PP, EP, recomputation, the microbatch budget, sequence parallelism and the distributed
optimizer of each trained role, and over the engine's batch or its share of the memory. The one for speed goes over CP
and what leaves the device while a role rests as well, and over the TP of servers. Roles are sized one by one, those
that others beat in memory and in order are dropped, and what is left is combined in order until something fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megappo.config import Config, ConfigError, derive, resolve
from megappo.config.load import flat_settings
from megappo.config.roles import LayoutSettings, OffloadSettings
from megappo.config.rules.batches import batch_rules
from megappo.config.rules.layouts import parallel_rules, placement_rules, valid_tensor_parallel, vocabulary_rules
from megappo.config.rules.role_spec import RoleSpec
from megappo.config.schema import RolloutSettings
from megappo.errors import divisors, show
from megappo.plan.costs import forward_cost, rollout_cost, sync_cost, update_cost
from megappo.plan.inputs import Models, RoleSettings, RoleSetup, Setup, Workload, reference_role, trained_role, workload
from megappo.plan.machines import MACHINES, Machine
from megappo.plan.memory import engine_memory, rank_memory, role_memory, server_memory
from megappo.plan.planner import make_plan
from megappo.plan.servers import Servers

_DEEPEST_PIPELINE = 16
_RECOMPUTE = ("none", "selective", "full")
_CONTEXTS, _CONTEXT_TOKENS = (2, 4, 8), 8192
"""Sizes of CP that are tried, where each CP rank then has at least so many tokens of the longest sample."""
_SERVER_RANKS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Proposal:
    """Settings that fit."""

    overrides: tuple[str, ...]
    """`key=value` arguments that turn the given configuration into this one."""
    machine: str
    gpus: int
    peak_bytes: float
    """Peak bytes on the fullest rank."""
    step_seconds: float
    roles: dict[str, str]
    """Each trained role's layout in words."""


class _Search(NamedTuple):
    """The task of a search."""

    given: Config
    """The user's settings, from which changes are counted."""
    config: Config
    """The configuration that the search starts from: the given one, or the given one with its roles on all ranks."""
    models: Models
    machine: Machine
    gpus: int
    by_speed: bool
    """Whether proposals are ordered by predicted seconds, then changes; otherwise by changes, then seconds."""

    def order(self, changes: float, seconds: float) -> tuple[float, float]:
        """Sort key: the preferred proposal is smallest."""
        return (seconds, changes) if self.by_speed else (changes, seconds)


class _Choice(NamedTuple):
    """One role's settings, sized."""

    settings: RoleSettings
    role: RoleSetup
    changes: float
    seconds: float
    at_rest: float
    """Bytes that stay on the device while the role rests, mean over all ranks of the world."""
    peak: float
    """Peak bytes of the role in its forward passes and updates."""


class _Batch(NamedTuple):
    """A size of the engine's batches, or of its memory."""

    rollout: RolloutSettings
    changes: float
    seconds: float
    """Seconds of the rollout."""
    n_bytes: float
    """Bytes of the engine on a trainer's device during the rollout."""


def nearest_fit(
    config: Config, models: Models, machine: Machine, gpus: int, *, everywhere: bool = False
) -> Proposal | None:
    """The settings that fit and change the given ones least, the faster of equals; None where nothing fits.

    `everywhere`: all roles on all devices, wherever the given ones stand.
    """
    config = resolve(config, on_cuda=machine.is_cuda)
    start = _everywhere(config) if everywhere else config
    return next(_fits(_Search(config, start, models, machine, gpus, by_speed=False)), None)


def best_layouts(config: Config, models: Models, machine: Machine, gpus: int, count: int = 5) -> list[Proposal]:
    """The fastest settings for the configuration's models, step and lengths with all roles on all devices: one for
    each combination of TP and PP, the fastest first. Empty where nothing fits.

    Raises ConfigError for what no layout fixes.
    """
    config = resolve(config, on_cuda=machine.is_cuda)
    _check_step(config, models)
    task = _Search(config, _everywhere(config), models, machine, gpus, by_speed=True)
    return sorted(itertools.islice(_fits(task), count), key=lambda proposal: proposal.step_seconds)


def remedy(config: Config, models: Models, machine: Machine, gpus: int) -> tuple[str, Proposal | None]:
    """One sentence on what to change where a configuration does not fit, and the settings it speaks of."""
    proposal = nearest_fit(config, models, machine, gpus)
    if proposal is not None:
        return f"the nearest layout that fits: {' '.join(proposal.overrides)}", proposal
    here = f"no layout on {gpus} x {machine.name} fits"
    for other, times in [(machine, 2), (machine, 4), *((m, n) for m in _larger(machine) for n in (1, 2, 4))]:
        proposal = nearest_fit(config, models, other, times * gpus, everywhere=True)
        if proposal is not None:
            changes = f" with {' '.join(proposal.overrides)}" if proposal.overrides else ""
            return f"{here}; {proposal.gpus} x {other.name} would do{changes}", proposal
    return f"{here}, nor on four times as many; shorten the response, or take a smaller model or critic.path", None


def _larger(machine: Machine) -> list[Machine]:
    """GPUs of the table with more memory than this one, each with more than those before it."""
    found = [machine]
    for other in MACHINES.values():
        if other.is_cuda and machine.is_cuda and other.memory_bytes > found[-1].memory_bytes:
            found.append(other)
    return found[1:]


def _check_step(config: Config, models: Models) -> None:
    """Refuse what breaks a rule on every layout: what is wrong on one rank with room for the longest sample."""
    longest = config.max_sequence_tokens
    for name, settings in config.trained.items():
        budget = max(longest, settings.microbatch_budget_tokens)
        plain = settings.model_copy(update={"layout": LayoutSettings(), "microbatch_budget_tokens": budget})
        config = config.model_copy(update={name: plain})
    derive(config, 1, models.actor, models.critic, models.reference)


def _everywhere(config: Config) -> Config:
    """The configuration with its roles on all ranks."""
    for name, settings in config.trained.items():
        layout = settings.layout.model_copy(update={"first_rank": 0, "ranks": None})
        config = config.model_copy(update={name: settings.model_copy(update={"layout": layout})})
    return config


def _fits(task: _Search) -> Iterator[Proposal]:
    """Proposals that fit, in the order of the search, each combination of TP and PP once."""
    choices = [list(_choices(task, name)) for name in task.config.trained]
    share, batches = task.machine.per_rank(task.gpus), list(_engine_batches(task))
    sized = []
    for roles in itertools.product(*choices):
        changes, seconds = sum(c.changes for c in roles), sum(c.seconds for c in roles)
        room = share.usable_bytes - sum(c.at_rest for c in roles)
        sized += [
            (task.order(changes + batch.changes, seconds + batch.seconds), roles, batch.rollout)
            for batch in batches
            if batch.n_bytes <= room
        ]
    seen = set()
    for _, roles, rollout in sorted(sized, key=lambda entry: entry[0]):
        sizes = tuple((c.role.grid.tp, c.role.grid.pp) for c in roles)
        if sizes in seen or not _fits_memory(task, roles, rollout, share.usable_bytes):
            continue
        proposal = _propose(task, {c.role.name: c.settings for c in roles}, rollout)
        if proposal is not None:
            seen.add(sizes)
            yield proposal


def _fits_memory(task: _Search, roles: Sequence[_Choice], rollout: RolloutSettings, usable_bytes: float) -> bool:
    # Whether the embedded engine sleeps follows from the roles' offload settings.
    settings = {choice.role.name: choice.settings for choice in roles}
    config = task.config.model_copy(update={**settings, "rollout": rollout})
    actor, critic = roles[0].role, roles[1].role if len(roles) > 1 else None
    reference = None if config.reference is None else reference_role(config, actor, task.models, roles[0].settings)
    setup = Setup(actor, critic, reference, _work(task, config))
    return all(ranks.peak <= usable_bytes for ranks in rank_memory(setup))


def _choices(task: _Search, name: str) -> Iterator[_Choice]:
    """The role's Pareto-optimal settings for each TP and PP: no other takes as little memory and comes earlier in the
    order."""
    work = _work(task, task.config)
    share, reference = task.machine.per_rank(task.gpus), task.config.reference
    found: dict[tuple[int, int], list[_Choice]] = {}
    for settings in _settings(task, name):
        on_cuda = task.machine.is_cuda
        role = trained_role(task.config, name, task.models, task.gpus, on_cuda=on_cuda, settings=settings)
        stages = [role_memory(role, stage, work) for stage in range(role.grid.pp)]
        peak = max(m.at_rest + max(m.updating, m.scoring) for m in stages)
        at_rest = sum(m.at_rest for m in stages) / role.grid.pp * len(role.grid.ranks) / task.gpus
        if peak <= share.usable_bytes:
            scored = [role]
            if name == "actor" and reference is not None:
                scored.append(reference_role(task.config, role, task.models, settings))
            seconds = update_cost(role, work, share).seconds + forward_cost(scored, work, share).seconds
            if name == "actor":
                seconds += sync_cost(Setup(role, None, None, work), share).seconds
            changes = _distance(task.config.trained[name], settings)
            choice = _Choice(settings, role, changes, seconds, at_rest, peak)
            found.setdefault((role.grid.tp, role.grid.pp), []).append(choice)
    for same_sizes in found.values():
        kept: list[_Choice] = []
        for choice in sorted(same_sizes, key=lambda c: task.order(c.changes, c.seconds)):
            if not any(k.at_rest <= choice.at_rest and k.peak <= choice.peak for k in kept):
                kept.append(choice)
        yield from kept


def _settings(task: _Search, name: str) -> Iterator[RoleSettings]:
    """Every setting of a role that the search knows and that its model, its ranks and the step allow."""
    given = task.config.trained[name]
    arch = task.models.of(name)
    longest = task.config.max_sequence_tokens
    budgets = sorted({given.microbatch_budget_tokens, *(longest * 2**n for n in range(4))})
    experts = divisors(max(1, arch.experts))
    pipelines = range(1, min(_DEEPEST_PIPELINE, arch.layers) + 1)
    contexts, offloads = _contexts(task, given), _offloads(task, given)
    for tp, pp, ep, cp in itertools.product(valid_tensor_parallel(arch), pipelines, experts, contexts):
        in_node = task.machine.shared_by_ranks or tp <= task.machine.devices_per_node
        if tp * pp * cp > task.gpus or not in_node:
            continue
        vpp = given.layout.virtual_pipeline_chunks
        chunks = vpp if pp > 1 and arch.layers >= pp * vpp else 1
        sizes: dict[str, Any] = {"tensor_parallel": tp, "pipeline_parallel": pp, "virtual_pipeline_chunks": chunks}
        sizes["context_parallel"] = cp
        if pp != given.layout.pipeline_parallel and isinstance(given.layout.pipeline_layers, tuple):
            sizes["pipeline_layers"] = "auto"
        sizes |= {"expert_parallel": ep} if arch.experts else {}
        said = given.layout.sequence_parallel
        for sequence_parallel in _switch(said) if tp > 1 else [None if said else said]:
            layout = given.layout.model_copy(update={**sizes, "sequence_parallel": sequence_parallel})
            placed = given.model_copy(update={"layout": layout, "microbatch_budget_tokens": max(budgets)})
            if not _is_valid(task, RoleSpec(name, placed, arch)):
                continue
            switches = itertools.product(_RECOMPUTE, budgets, _switch(given.optimizer.distributed), offloads)
            for recompute, budget, distributed, offload in switches:
                optimizer = given.optimizer.model_copy(update={"distributed": distributed})
                changes = {"recompute": recompute, "microbatch_budget_tokens": budget, "optimizer": optimizer}
                changes["offload"] = offload
                if budget >= placed.layout.grid(task.gpus).padded(longest):
                    yield placed.model_copy(update=changes)


def _switch(given: bool | None) -> list[bool | None]:
    """The given value; where that is false, also the default (None), which shards."""
    return [False, None] if given is False else [given]


def _contexts(task: _Search, given: RoleSettings) -> list[int]:
    """Sizes of CP to try: the given one; in a search for speed also those that leave each rank enough of the longest
    sample."""
    if not task.by_speed:
        return [given.layout.context_parallel]
    fitting = (cp for cp in _CONTEXTS if cp * _CONTEXT_TOKENS <= task.config.max_sequence_tokens)
    return sorted({given.layout.context_parallel, 1, *fitting})


def _offloads(task: _Search, given: RoleSettings) -> list[OffloadSettings]:
    """Offload settings to try: the given ones; in a search for speed on GPUs also nothing and everything."""
    if not (task.by_speed and task.machine.is_cuda):
        return [given.offload]
    nothing, everything = OffloadSettings(), OffloadSettings(weights=True, gradients=True, optimizer=True)
    return [given.offload, *(offload for offload in (nothing, everything) if offload != given.offload)]


def _is_valid(task: _Search, role: RoleSpec) -> bool:
    """Whether the rules of a run allow a role's layout; `_propose` asks the others."""
    if any(placement_rules(role, task.gpus)) or any(parallel_rules(role, role.name)):
        return False
    return not any(vocabulary_rules(task.config, [role])) and not any(batch_rules(task.config, role, task.gpus))


def _distance(given: RoleSettings, tried: RoleSettings) -> float:
    """How far settings are from the given ones. Each doubling of TP, PP, CP or EP and a change of the offload count 1;
    a doubling of the microbatch budget and a step of recomputation count a half; each switch counts a quarter."""

    def doublings(a: int, b: int) -> float:
        return abs(math.log2(a / b))

    return (
        doublings(given.layout.tensor_parallel, tried.layout.tensor_parallel)
        + doublings(given.layout.pipeline_parallel, tried.layout.pipeline_parallel)
        + doublings(given.layout.expert_parallel, tried.layout.expert_parallel)
        + 0.5 * abs(_RECOMPUTE.index(given.recompute) - _RECOMPUTE.index(tried.recompute))
        + 0.5 * doublings(given.microbatch_budget_tokens, tried.microbatch_budget_tokens)
        + 0.25 * (given.layout.sequence_parallel != tried.layout.sequence_parallel)
        + 0.25 * (given.optimizer.distributed != tried.optimizer.distributed)
        + doublings(given.layout.context_parallel, tried.layout.context_parallel)
        + (given.offload != tried.offload)
    )


def _engine_batches(task: _Search) -> Iterator[_Batch]:
    """The engine's Pareto-optimal settings in memory and order: for the embedded engine its batch and halves of it; for
    SGLang beside trainers its TP and its share of the memory."""
    given, arch, share = task.config.rollout, task.models.actor, task.machine.per_rank(task.gpus)
    found = []
    for rollout, changes in _rollouts(task, given):
        work = _work(task, task.config.model_copy(update={"rollout": rollout}))
        if work.servers is None:
            n_bytes = engine_memory(arch, work).total
        else:
            n_bytes = 0.0 if work.servers.beside else server_memory(arch, work.servers, work).total
        found.append(_Batch(rollout, changes, rollout_cost(arch, work, share).seconds, n_bytes))
    kept: list[_Batch] = []
    for batch in sorted(found, key=lambda b: task.order(b.changes, b.seconds)):
        if not any(k.n_bytes <= batch.n_bytes for k in kept):
            kept.append(batch)
    yield from kept


def _rollouts(task: _Search, given: RolloutSettings) -> Iterator[tuple[RolloutSettings, float]]:
    """Settings of the engine with their distance from the given ones: half a change for a halving of the batch or a
    tenth of the memory, one for a doubling of TP."""
    yield given, 0.0
    servers = _work(task, task.config).servers
    if servers is None:
        batch, halvings = given.generate_batch_sequences, 0
        while batch := batch // 2:
            halvings += 1
            yield given.model_copy(update={"generate_batch_sequences": batch}), 0.5 * halvings
    elif servers.colocated and servers.static_bytes:
        its = given.servers
        last = math.ceil(10 * its.memory_fraction)
        for tp in _server_ranks(task, servers):
            for tenth in range(1, 10 if task.by_speed else last):
                changes = abs(math.log2(tp / its.tensor_parallel)) + 0.5 * max(1, abs(last - tenth))
                other = its.model_copy(update={"tensor_parallel": tp, "memory_fraction": tenth / 10})
                yield given.model_copy(update={"sglang": other}), changes


def _server_ranks(task: _Search, servers: Servers) -> list[int]:
    """Sizes of TP to try for servers inside a node; only the given one where the search is not for speed, or where
    servers span nodes or attend in groups."""
    given, arch = servers.tensor_parallel, task.models.actor
    if not task.by_speed or servers.nodes > 1 or servers.attention_groups > 1:
        return [given]
    most = min(task.machine.devices_per_node, task.gpus)
    even = task.config.rollout.servers.expert_parallel
    fitting = {n for n in _SERVER_RANKS if n <= most and task.gpus % n == 0 and arch.heads % n == 0 and n % even == 0}
    return sorted(fitting | {given})


def _work(task: _Search, config: Config) -> Workload:
    device_bytes = task.machine.per_rank(task.gpus).memory_bytes
    return workload(config, task.gpus, on_cuda=task.machine.is_cuda, device_bytes=device_bytes)


def _propose(task: _Search, settings: dict[str, RoleSettings], rollout: RolloutSettings) -> Proposal | None:
    """The settings as overrides of the given ones, planned in full; None where a rule or the memory refuses them."""
    tried = task.config.model_copy(update={**settings, "rollout": rollout})
    try:
        plan = make_plan(tried, task.models, task.machine, task.gpus)
    except ConfigError:
        return None
    if not plan.fits:
        return None
    overrides = list(_overrides(task.given, tried))
    words = {name: _words(task, s) for name, s in settings.items()}
    return Proposal(tuple(overrides), task.machine.name, task.gpus, plan.fullest.peak, plan.step_seconds, words)


def _overrides(given: Config, tried: Config) -> Iterator[str]:
    """`key=value` for each setting of `tried` that is another in `given`."""
    if tried.rollout.sglang is not None and given.rollout.sglang is None:
        given = given.model_copy(update={"rollout": given.rollout.model_copy(update={"sglang": given.rollout.servers})})
    before = dict(flat_settings(given.model_dump()))
    for key, value in flat_settings(tried.model_dump()):
        if before.get(key) != value:
            yield f"{key}={value if isinstance(value, str) else show(value)}"


def _words(task: _Search, settings: RoleSettings) -> str:
    layout = settings.layout
    words = [f"TP {layout.tensor_parallel} x PP {layout.pipeline_parallel} x DP {layout.grid(task.gpus).dp}"]
    words += [f"CP {layout.context_parallel}"] if layout.context_parallel > 1 else []
    words += [f"EP {layout.expert_parallel}"] if layout.expert_parallel > 1 else []
    words += ["sequence parallel"] if layout.shards_sequences else []
    words += ["distributed optimizer"] if settings.optimizer.shards_state(layout.grid(task.gpus)) else []
    words += ["off the device while it rests"] if settings.offload.parts else []
    words += [f"recompute {settings.recompute}", f"{settings.microbatch_budget_tokens} tokens"]
    return ", ".join(words)
