"""Layouts that fit: the layout nearest to the configured one, and the fastest layouts for a number of devices.

The search varies TP, PP, EP, recomputation, the microbatch budget, sequence parallelism and the distributed optimizer
of each trained role. It also varies the batch of the engine or its share of the memory. A search for speed
additionally varies CP, offload and the TP of servers.

Settings are computed for each role separately. Settings that are worse than others in both memory and order are
dropped. The remaining settings are combined in order until a combination fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megappo.config import Config, ConfigError, derive, resolve
from megappo.config.load import flat_settings
from megappo.config.rollout import RolloutSettings
from megappo.config.rules.batches import batch_rules
from megappo.config.rules.layouts import parallel_rules, placement_rules, valid_tensor_parallel, vocabulary_rules
from megappo.config.rules.role_spec import RoleSpec
from megappo.config.sections.roles import LayoutSettings, OffloadSettings
from megappo.errors import divisors, show
from megappo.plan.bytes.memory import engine_memory, rank_memory, role_memory, server_memory
from megappo.plan.bytes.servers import Servers
from megappo.plan.costs import forward_cost, rollout_cost, sync_cost, update_cost
from megappo.plan.hardware.machines import MACHINES, Machine
from megappo.plan.inputs import Models, RoleSettings, RoleSetup, Setup, Workload, reference_role, trained_role, workload
from megappo.plan.planner import make_plan

_DEEPEST_PIPELINE = 16
_RECOMPUTE = ("none", "selective", "full")
_CONTEXTS, _CONTEXT_TOKENS = (2, 4, 8), 8192
"""Sizes of CP to try, and the least number of tokens of the longest sample on each CP rank."""
_SERVER_RANKS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Proposal:
    """Proposed settings that fit."""

    overrides: tuple[str, ...]
    """Overrides (`key=value`) that change the user's configuration to the proposal."""
    machine: str
    gpus: int
    peak_bytes: float
    """Largest peak in bytes over all ranks."""
    step_seconds: float
    roles: dict[str, str]
    """Description of the layout of each trained role."""


class _Search(NamedTuple):
    """Task of a search."""

    user_config: Config
    """User's settings. Changes are counted from these settings."""
    config: Config
    """Configuration at the start of the search: the user's configuration, or the same with all roles on all ranks."""
    models: Models
    machine: Machine
    gpus: int
    by_speed: bool
    """Whether proposals are ordered by predicted seconds first and by changes second, or the reverse."""

    def order(self, changes: float, seconds: float) -> tuple[float, float]:
        """Return the sort key. The preferred proposal has the smallest key."""
        return (seconds, changes) if self.by_speed else (changes, seconds)


class _Choice(NamedTuple):
    """Settings of one role with their predicted sizes."""

    settings: RoleSettings
    role: RoleSetup
    changes: float
    seconds: float
    at_rest: float
    """Bytes on the device between uses of the role, as a mean over all ranks of the world."""
    peak: float
    """Peak bytes of the role during its forward passes and updates."""


class _Batch(NamedTuple):
    """Batch size or memory share of the engine."""

    rollout: RolloutSettings
    changes: float
    seconds: float
    """Seconds of the rollout."""
    n_bytes: float
    """Bytes of the engine on the device of a trainer during the rollout."""


def nearest_fit(
    config: Config, models: Models, machine: Machine, gpus: int, *, everywhere: bool = False
) -> Proposal | None:
    """Return the settings that fit with the fewest changes. Of settings with equal changes, return the fastest. Return
    None if no settings fit.

    `everywhere` places all roles on all devices, regardless of the configured placement.
    """
    config = resolve(config, on_cuda=machine.is_cuda)
    start = _everywhere(config) if everywhere else config
    return next(_fits(_Search(config, start, models, machine, gpus, by_speed=False)), None)


def best_layouts(config: Config, models: Models, machine: Machine, gpus: int, count: int = 5) -> list[Proposal]:
    """Return the fastest settings for the models, step and lengths of the configuration, with all roles on all
    devices. The list has one proposal for each combination of TP and PP, from fastest to slowest. The list is empty if
    no settings fit.

    Raises ConfigError if a setting is invalid for every layout.
    """
    config = resolve(config, on_cuda=machine.is_cuda)
    _check_step(config, models)
    task = _Search(config, _everywhere(config), models, machine, gpus, by_speed=True)
    return sorted(itertools.islice(_fits(task), count), key=lambda proposal: proposal.step_seconds)


def remedy(config: Config, models: Models, machine: Machine, gpus: int) -> tuple[str, Proposal | None]:
    """Return one sentence that proposes a change to a configuration that does not fit, and the proposed settings."""
    proposal = nearest_fit(config, models, machine, gpus)
    if proposal is not None:
        return f"the nearest layout that fits: {' '.join(proposal.overrides)}", proposal
    failure = f"no layout on {gpus} x {machine.name} fits"
    for other, times in [(machine, 2), (machine, 4), *((m, n) for m in _larger(machine) for n in (1, 2, 4))]:
        proposal = nearest_fit(config, models, other, times * gpus, everywhere=True)
        if proposal is not None:
            changes = f" with {' '.join(proposal.overrides)}" if proposal.overrides else ""
            return f"{failure}; {proposal.gpus} x {other.name} would fit{changes}", proposal
    return (
        f"{failure}, nor on four times the number; shorten the response, or use a smaller model or critic.path",
        None,
    )


def _larger(machine: Machine) -> list[Machine]:
    """Return the GPUs of the table with more memory than this machine, in increasing order of memory."""
    machines = [machine]
    for other in MACHINES.values():
        if other.is_cuda and machine.is_cuda and other.memory_bytes > machines[-1].memory_bytes:
            machines.append(other)
    return machines[1:]


def _check_step(config: Config, models: Models) -> None:
    """Check the settings that are independent of the layout. All roles are checked on one rank with room for the
    longest sample.

    Raises ConfigError if a setting is invalid.
    """
    longest = config.max_sequence_tokens
    for name, settings in config.trained.items():
        budget = max(longest, settings.microbatch_budget_tokens)
        plain = settings.model_copy(update={"layout": LayoutSettings(), "microbatch_budget_tokens": budget})
        config = config.model_copy(update={name: plain})
    derive(config, 1, models.actor, models.critic, models.reference)


def _everywhere(config: Config) -> Config:
    """Return the configuration with its roles on all ranks."""
    for name, settings in config.trained.items():
        layout = settings.layout.model_copy(update={"first_rank": 0, "ranks": None})
        config = config.model_copy(update={name: settings.model_copy(update={"layout": layout})})
    return config


def _fits(task: _Search) -> Iterator[Proposal]:
    """Yield proposals that fit, in the order of the search. Each combination of TP and PP occurs once."""
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
    # The offload settings of the roles determine whether the embedded engine sleeps.
    settings = {choice.role.name: choice.settings for choice in roles}
    config = task.config.model_copy(update={**settings, "rollout": rollout})
    actor, critic = roles[0].role, roles[1].role if len(roles) > 1 else None
    reference = None if config.reference is None else reference_role(config, actor, task.models, roles[0].settings)
    setup = Setup(actor, critic, reference, _work(task, config))
    return all(ranks.peak <= usable_bytes for ranks in rank_memory(setup))


def _choices(task: _Search, name: str) -> Iterator[_Choice]:
    """Yield the Pareto-optimal settings of a role for each TP and PP. Settings are dropped if other settings come
    earlier in the order and need no more memory."""
    work = _work(task, task.config)
    share, reference = task.machine.per_rank(task.gpus), task.config.reference
    by_sizes: dict[tuple[int, int], list[_Choice]] = {}
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
            by_sizes.setdefault((role.grid.tp, role.grid.pp), []).append(choice)
    for same_sizes in by_sizes.values():
        undominated: list[_Choice] = []
        for choice in sorted(same_sizes, key=lambda c: task.order(c.changes, c.seconds)):
            if not any(other.at_rest <= choice.at_rest and other.peak <= choice.peak for other in undominated):
                undominated.append(choice)
        yield from undominated


def _settings(task: _Search, name: str) -> Iterator[RoleSettings]:
    """Yield all settings of a role in the search space that the model, the ranks and the step allow."""
    settings = task.config.trained[name]
    arch = task.models.of(name)
    longest = task.config.max_sequence_tokens
    budgets = sorted({settings.microbatch_budget_tokens, *(longest * 2**n for n in range(4))})
    experts = divisors(max(1, arch.experts))
    pipelines = range(1, min(_DEEPEST_PIPELINE, arch.layers) + 1)
    contexts, offloads = _contexts(task, settings), _offloads(task, settings)
    for tp, pp, ep, cp in itertools.product(valid_tensor_parallel(arch), pipelines, experts, contexts):
        in_node = task.machine.shared_by_ranks or tp <= task.machine.devices_per_node
        if tp * pp * cp > task.gpus or not in_node:
            continue
        vpp = settings.layout.virtual_pipeline_chunks
        chunks = vpp if pp > 1 and arch.layers >= pp * vpp else 1
        sizes: dict[str, Any] = {"tensor_parallel": tp, "pipeline_parallel": pp, "virtual_pipeline_chunks": chunks}
        sizes["context_parallel"] = cp
        if pp != settings.layout.pipeline_parallel and isinstance(settings.layout.pipeline_layers, tuple):
            sizes["pipeline_layers"] = "auto"
        sizes |= {"expert_parallel": ep} if arch.experts else {}
        configured = settings.layout.sequence_parallel
        for sequence_parallel in _switch(configured) if tp > 1 else [None if configured else configured]:
            layout = settings.layout.model_copy(update={**sizes, "sequence_parallel": sequence_parallel})
            placed = settings.model_copy(update={"layout": layout, "microbatch_budget_tokens": max(budgets)})
            if not _is_valid(task, RoleSpec(name, placed, arch)):
                continue
            switches = itertools.product(_RECOMPUTE, budgets, _switch(settings.optimizer.distributed), offloads)
            for recompute, budget, distributed, offload in switches:
                optimizer = settings.optimizer.model_copy(update={"distributed": distributed})
                changes = {"recompute": recompute, "microbatch_budget_tokens": budget, "optimizer": optimizer}
                changes["offload"] = offload
                if budget >= placed.layout.grid(task.gpus).padded(longest):
                    yield placed.model_copy(update=changes)


def _switch(value: bool | None) -> list[bool | None]:
    """Return the values to try. A configured value of false is tried together with the default (None), which enables
    sharding. Other values are returned unchanged."""
    return [False, None] if value is False else [value]


def _contexts(task: _Search, settings: RoleSettings) -> list[int]:
    """Return the sizes of CP to try: the configured size. A search for speed also tries sizes that leave each rank
    enough tokens of the longest sample."""
    if not task.by_speed:
        return [settings.layout.context_parallel]
    fitting = (cp for cp in _CONTEXTS if cp * _CONTEXT_TOKENS <= task.config.max_sequence_tokens)
    return sorted({settings.layout.context_parallel, 1, *fitting})


def _offloads(task: _Search, settings: RoleSettings) -> list[OffloadSettings]:
    """Return the offload settings to try: the configured settings. A search for speed on GPUs also tries no offload
    and full offload."""
    if not (task.by_speed and task.machine.is_cuda):
        return [settings.offload]
    nothing, everything = OffloadSettings(), OffloadSettings(weights=True, gradients=True, optimizer=True)
    return [settings.offload, *(offload for offload in (nothing, everything) if offload != settings.offload)]


def _is_valid(task: _Search, role: RoleSpec) -> bool:
    """Return whether the rules of a run allow the layout of a role. `_propose` checks the other rules."""
    if any(placement_rules(role, task.gpus)) or any(parallel_rules(role, role.name)):
        return False
    return not any(vocabulary_rules(task.config, [role])) and not any(batch_rules(task.config, role, task.gpus))


def _distance(original: RoleSettings, tried: RoleSettings) -> float:
    """Return the distance between two settings. Each doubling of TP, PP, CP or EP counts 1, as does a change of
    offload. A doubling of the microbatch budget and a step of recomputation each count 0.5. Each switch counts 0.25."""

    def doublings(a: int, b: int) -> float:
        return abs(math.log2(a / b))

    return (
        doublings(original.layout.tensor_parallel, tried.layout.tensor_parallel)
        + doublings(original.layout.pipeline_parallel, tried.layout.pipeline_parallel)
        + doublings(original.layout.expert_parallel, tried.layout.expert_parallel)
        + 0.5 * abs(_RECOMPUTE.index(original.recompute) - _RECOMPUTE.index(tried.recompute))
        + 0.5 * doublings(original.microbatch_budget_tokens, tried.microbatch_budget_tokens)
        + 0.25 * (original.layout.sequence_parallel != tried.layout.sequence_parallel)
        + 0.25 * (original.optimizer.distributed != tried.optimizer.distributed)
        + doublings(original.layout.context_parallel, tried.layout.context_parallel)
        + (original.offload != tried.offload)
    )


def _engine_batches(task: _Search) -> Iterator[_Batch]:
    """Yield the Pareto-optimal settings of the engine in memory and order. The embedded engine varies its batch by
    halving. SGLang servers on trainer devices vary TP and the share of memory."""
    settings, arch, share = task.config.rollout, task.models.actor, task.machine.per_rank(task.gpus)
    batches = []
    for rollout, changes in _rollouts(task, settings):
        work = _work(task, task.config.model_copy(update={"rollout": rollout}))
        if work.servers is None:
            n_bytes = engine_memory(arch, work).total
        else:
            n_bytes = 0.0 if work.servers.has_own_devices else server_memory(arch, work.servers, work).total
        batches.append(_Batch(rollout, changes, rollout_cost(arch, work, share).seconds, n_bytes))
    undominated: list[_Batch] = []
    for batch in sorted(batches, key=lambda b: task.order(b.changes, b.seconds)):
        if not any(other.n_bytes <= batch.n_bytes for other in undominated):
            undominated.append(batch)
    yield from undominated


def _rollouts(task: _Search, settings: RolloutSettings) -> Iterator[tuple[RolloutSettings, float]]:
    """Yield settings of the engine with their distance from the configured ones. A halving of the batch or a change of
    memory by a tenth counts 0.5. A doubling of TP counts 1."""
    yield settings, 0.0
    servers = _work(task, task.config).servers
    if servers is None:
        batch, halvings = settings.generate_batch_sequences, 0
        while batch := batch // 2:
            halvings += 1
            yield settings.model_copy(update={"generate_batch_sequences": batch}), 0.5 * halvings
    elif servers.colocated and servers.static_bytes:
        its = settings.server_settings
        last = math.ceil(10 * its.memory_fraction)
        for tp in _server_ranks(task, servers):
            for tenth in range(1, 10 if task.by_speed else last):
                changes = abs(math.log2(tp / its.tensor_parallel)) + 0.5 * max(1, abs(last - tenth))
                other = its.model_copy(update={"tensor_parallel": tp, "memory_fraction": tenth / 10})
                yield settings.model_copy(update={"servers": other}), changes


def _server_ranks(task: _Search, servers: Servers) -> list[int]:
    """Return the sizes of TP to try for servers inside a node. Return only the configured size if the search is not
    for speed, if servers span nodes, or if servers attend in groups."""
    tensor_parallel, arch = servers.tensor_parallel, task.models.actor
    if not task.by_speed or servers.nodes > 1 or servers.attention_groups > 1:
        return [tensor_parallel]
    most = min(task.machine.devices_per_node, task.gpus)
    even = task.config.rollout.server_settings.expert_parallel
    fitting = {n for n in _SERVER_RANKS if n <= most and task.gpus % n == 0 and arch.heads % n == 0 and n % even == 0}
    return sorted(fitting | {tensor_parallel})


def _work(task: _Search, config: Config) -> Workload:
    device_bytes = task.machine.per_rank(task.gpus).memory_bytes
    return workload(config, task.gpus, on_cuda=task.machine.is_cuda, device_bytes=device_bytes)


def _propose(task: _Search, settings: dict[str, RoleSettings], rollout: RolloutSettings) -> Proposal | None:
    """Return the settings as overrides of the user's configuration, with a complete plan. Return None if the settings
    break a rule or do not fit into memory."""
    tried = task.config.model_copy(update={**settings, "rollout": rollout})
    try:
        plan = make_plan(tried, task.models, task.machine, task.gpus)
    except ConfigError:
        return None
    if not plan.fits:
        return None
    overrides = list(_overrides(task.user_config, tried))
    layouts = {name: _format_layout(task, s) for name, s in settings.items()}
    return Proposal(tuple(overrides), task.machine.name, task.gpus, plan.fullest.peak, plan.step_seconds, layouts)


def _overrides(base: Config, tried: Config) -> Iterator[str]:
    """Yield `key=value` for each setting of `tried` that differs from `base`."""
    before = dict(flat_settings(base.model_dump()))
    for key, value in flat_settings(tried.model_dump()):
        if before.get(key) != value:
            yield f"{key}={value if isinstance(value, str) else show(value)}"


def _format_layout(task: _Search, settings: RoleSettings) -> str:
    layout = settings.layout
    parts = [f"TP {layout.tensor_parallel} x PP {layout.pipeline_parallel} x DP {layout.grid(task.gpus).dp}"]
    parts += [f"CP {layout.context_parallel}"] if layout.context_parallel > 1 else []
    parts += [f"EP {layout.expert_parallel}"] if layout.expert_parallel > 1 else []
    parts += ["sequence parallel"] if layout.shards_sequences else []
    parts += ["distributed optimizer"] if settings.optimizer.shards_state(layout.grid(task.gpus)) else []
    parts += ["offload between uses"] if settings.offload.parts else []
    parts += [f"recompute {settings.recompute}", f"{settings.microbatch_budget_tokens} tokens"]
    return ", ".join(parts)
