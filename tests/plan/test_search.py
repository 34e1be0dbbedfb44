"""The search for layouts compared with an exhaustive search: the fastest layouts that fit, and the nearest one."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest

from megappo.config import Config, ConfigError, load_config
from megappo.config.sections.roles import OffloadSettings
from megappo.plan.hardware.machines import MACHINES, Machine
from megappo.plan.inputs import Models, RoleSettings
from megappo.plan.planner import Plan, make_plan
from megappo.plan.search import best_layouts, nearest_fit, remedy
from tests.support.places import ROOT
from tests.support.plan import arch, with_experts
from tests.support.quick import cases

MIDDLE = ROOT / "tests/support/qwen3_8b_8gpu.yaml"
RECOMPUTE = ("none", "selective", "full")
LONGEST = 100
GPUS = 6
PLAIN = ("critic=null", "algorithm.estimator=reinforce_plus_plus")
STEP = (
    "rollout.engine=transformers", "data.max_prompt_tokens=40", "rollout.max_response_tokens=60",
    "rollout.prompts_per_step=96", "rollout.generate_batch_sequences=6",
)  # fmt: skip
BATCHES = (6, 3, 1)


def role_overrides(role: str, layout: str) -> tuple[str, ...]:
    return (
        f"{role}.layout={{{layout}}}", f"{role}.minibatch_sequences=48", f"{role}.microbatch_budget_tokens=300",
        f"{role}.optimizer.distributed=false",
    )  # fmt: skip


WHOLE = "sequence_parallel: false"
DENSE = (*PLAIN, *STEP, *role_overrides("actor", f"{WHOLE}, pipeline_parallel: 2, virtual_pipeline_chunks: 3"))
SEQUENCE = (*PLAIN, *STEP, *role_overrides("actor", "tensor_parallel: 3, sequence_parallel: true"))
SHARED = (*PLAIN, *STEP, *role_overrides("actor", f"{WHOLE}, context_parallel: 2"))
BOTH = (*STEP, *role_overrides("actor", "pipeline_parallel: 2"), *role_overrides("critic", "tensor_parallel: 3"))
CASES = {"dense": DENSE, "sequence": SEQUENCE, "context": SHARED, "experts": DENSE}


def settings(original: RoleSettings, experts: int, *, for_speed: bool = True) -> Iterator[RoleSettings]:
    """Yield all candidate settings of a role with six layers and three key and value heads. A pipeline keeps its chunks
    if they divide the layers. Disabled sharding can be enabled. With `for_speed`, context parallelism can be disabled,
    and the whole role can be offloaded."""
    budgets = {original.microbatch_budget_tokens, *(LONGEST * 2**n for n in range(4))}
    shares = [n for n in range(1, experts + 1) if experts % n == 0] or [1]
    distributed_too = (False, None) if original.optimizer.distributed is False else (original.optimizer.distributed,)
    sequence_parallel = original.layout.sequence_parallel
    everything = OffloadSettings(weights=True, gradients=True, optimizer=True)
    offloads = (original.offload, everything) if for_speed else (original.offload,)
    contexts = {original.layout.context_parallel, 1} if for_speed else {original.layout.context_parallel}
    for tp, pp, ep, cp in itertools.product((1, 3), (1, 2, 3, 6), shares, contexts):
        chunks = original.layout.virtual_pipeline_chunks if pp == 2 else 1
        layout: dict[str, Any] = {"tensor_parallel": tp, "pipeline_parallel": pp, "expert_parallel": ep}
        layout["context_parallel"] = cp
        layout["virtual_pipeline_chunks"] = chunks
        for layout["sequence_parallel"] in (
            (False, None) if sequence_parallel is False else (sequence_parallel if tp > 1 else None,)
        ):
            switches = itertools.product(RECOMPUTE, budgets, distributed_too, offloads)
            for recompute, budget, distributed, offload in switches:
                changes = {"recompute": recompute, "microbatch_budget_tokens": budget, "offload": offload}
                optimizer = original.optimizer.model_copy(update={"distributed": distributed})
                placed = original.layout.model_copy(update=layout)
                yield original.model_copy(update={**changes, "optimizer": optimizer, "layout": placed})


def distance(before: RoleSettings, after: RoleSettings) -> float:
    """Return the distance of two settings. Doublings of TP, PP, CP and EP and changes of offloading count one each.
    Doublings of the budget and steps of recomputation count a half. Switches count a quarter."""
    total = float(before.offload != after.offload)
    for size in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        total += abs(math.log2(getattr(before.layout, size)) - math.log2(getattr(after.layout, size)))
    total += abs(math.log2(before.microbatch_budget_tokens) - math.log2(after.microbatch_budget_tokens)) / 2
    total += abs(RECOMPUTE.index(before.recompute) - RECOMPUTE.index(after.recompute)) / 2
    switches = (
        before.layout.sequence_parallel != after.layout.sequence_parallel,
        before.optimizer.distributed != after.optimizer.distributed,
    )
    return total + sum(switches) / 4


def sizes(role: RoleSettings) -> tuple[int, int]:
    return role.layout.tensor_parallel, role.layout.pipeline_parallel


def contexts(role: RoleSettings) -> int:
    return role.layout.context_parallel


def planned(config: Config, models: Models, machine: Machine = MACHINES["h100"]) -> Plan | None:
    """Return the plan, or None if the configuration is refused."""
    try:
        return make_plan(config, models, machine, GPUS)
    except ConfigError:
        return None


class Tried(NamedTuple):
    """A candidate of the exhaustive search and its plan."""

    sizes: tuple[int, int]
    changes: float
    plan: Plan
    is_near: bool
    """Whether `nearest_fit` can try the candidate. Settings that only the search for speed varies are unchanged."""


@cache
def everything(case: str) -> tuple[Tried, ...]:
    """Return the plans of all settings of the actor and all batch sizes of the engine."""
    config, results = load_config(MIDDLE, CASES[case]), []
    for actor in settings(config.actor, models_of(case).actor.experts):
        for halvings, batch in enumerate(BATCHES):
            rollout = config.rollout.model_copy(update={"generate_batch_sequences": batch})
            plan = planned(config.model_copy(update={"actor": actor, "rollout": rollout}), models_of(case))
            if plan is not None:
                near = actor.offload == config.actor.offload and contexts(actor) == contexts(config.actor)
                results.append(Tried(sizes(actor), distance(config.actor, actor) + halvings / 2, plan, near))
    return tuple(results)


def models_of(case: str) -> Models:
    model = with_experts(experts=3, experts_per_token=2) if case == "experts" else arch()
    return Models(model, model, model)


def with_room(usable_bytes: float) -> Machine:
    """Return an H100 with this number of usable bytes."""
    machine = dataclasses.replace(MACHINES["h100"], memory_bytes=(usable_bytes + 3e9) / 0.95)
    assert machine.usable_bytes == pytest.approx(usable_bytes)
    return machine


@pytest.mark.parametrize(
    ("share", "case"),
    cases(
        itertools.product([1.0, 0.6, 0.3, 0.1, 0.03, 0.01, 0.003], CASES), quick=[(0.3, "dense"), (0.01, "sequence")]
    ),
)
def test_search_matches_the_exhaustive_search(share: float, case: str) -> None:
    """The memory is so small that only a share of all settings fits."""
    models, overrides = models_of(case), CASES[case]
    config = load_config(MIDDLE, overrides)
    peaks = sorted(t.plan.fullest.peak for t in everything(case))
    machine = with_room(peaks[math.ceil(share * len(peaks)) - 1] * 1.000001)
    fitting = [t for t in everything(case) if t.plan.fullest.peak <= machine.usable_bytes]
    fastest: dict[tuple[int, int], float] = {}
    for t in fitting:
        fastest[t.sizes] = min(t.plan.step_seconds, fastest.get(t.sizes, math.inf))
    proposals = best_layouts(config, models, machine, GPUS, count=99)
    assert [p.step_seconds for p in proposals] == pytest.approx(sorted(fastest.values()), rel=1e-12)
    assert len(best_layouts(config, models, machine, GPUS)) == min(5, len(fastest))
    nearest = nearest_fit(config, models, machine, GPUS)
    near = [(t.changes, t.plan.step_seconds) for t in fitting if t.is_near]
    assert (nearest is None) == (not near)
    for proposal in (*proposals, *([] if nearest is None else [nearest])):
        changed = load_config(MIDDLE, [*overrides, *proposal.overrides])
        result = make_plan(changed, models, machine, GPUS)
        assert (result.step_seconds, result.fullest.peak) == (proposal.step_seconds, proposal.peak_bytes)
        assert result.fits and (proposal.machine, proposal.gpus) == ("h100", GPUS)
        assert proposal.roles == {"actor": description(changed)}
    if nearest is not None:
        changes, seconds = min(near)
        assert nearest.step_seconds == pytest.approx(seconds, rel=1e-12)
        changed = load_config(MIDDLE, [*overrides, *nearest.overrides])
        halvings = BATCHES.index(changed.rollout.generate_batch_sequences)
        assert distance(config.actor, changed.actor) + halvings / 2 == pytest.approx(changes)


@pytest.mark.parametrize("reference", ["reference={}", "reference=null"])
@pytest.mark.parametrize("share", cases([1.0, 0.5, 0.3], quick=(0.5,)))
def test_changing_one_role_improves_no_proposal(reference: str, share: float) -> None:
    """The plan has actor, critic and reference. The memory is a share of the memory of the fastest settings."""
    overrides = [*BOTH, reference, *(["algorithm.kl_in_reward=null"] if reference == "reference=null" else [])]
    config, models = load_config(MIDDLE, overrides), Models(arch(), arch(hidden_size=61), arch(hidden_size=83))
    (fastest,) = best_layouts(config, models, MACHINES["h100"], GPUS, count=1)
    machine = with_room(share * fastest.peak_bytes * 1.000001)
    nearest = nearest_fit(config, models, machine, GPUS)
    proposals = best_layouts(config, models, machine, GPUS, count=3)
    assert nearest is not None and proposals
    for proposal in (*proposals, nearest):
        changed = load_config(MIDDLE, [*overrides, *proposal.overrides])
        assert changed.critic is not None
        for name, its in (("actor", changed.actor), ("critic", changed.critic)):
            before: RoleSettings = getattr(config, name)
            for other in settings(before, 0, for_speed=proposal is not nearest):
                if proposal is not nearest and sizes(other) != sizes(its):
                    continue
                closer = distance(before, other) - distance(before, its)
                if proposal is nearest and closer > 0:
                    continue
                plan = planned(changed.model_copy(update={name: other}), models, machine)
                if plan is not None and plan.fits:
                    assert (proposal is not nearest or closer == 0) and plan.step_seconds >= proposal.step_seconds * (
                        1 - 1e-12
                    )


def description(config: Config) -> str:
    actor = config.actor
    kinds = ("tensor", "pipeline", "expert", "context")
    tp, pp, ep, cp = (getattr(actor.layout, f"{kind}_parallel") for kind in kinds)
    parts = [f"TP {tp} x PP {pp} x DP {GPUS // tp // pp // cp}"] + [f"CP {cp}"] * (cp > 1)
    parts += [f"EP {ep}"] * (ep > 1) + ["sequence parallel"] * actor.layout.shards_sequences
    parts += ["distributed optimizer"] * actor.optimizer.shards_state(actor.layout.grid(GPUS))
    parts += ["offload between uses"] * bool(actor.offload.parts)
    return ", ".join([*parts, f"recompute {actor.recompute}", f"{actor.microbatch_budget_tokens} tokens"])


def test_roles_on_some_ranks_are_moved_to_all() -> None:
    config = load_config(MIDDLE, [*DENSE, "actor.layout.first_rank=2", "actor.layout.ranks=4"])
    models, machine = models_of("dense"), MACHINES["h100"]
    moved = best_layouts(config, models, machine, GPUS)
    assert [p.step_seconds for p in moved] == [
        p.step_seconds for p in best_layouts(load_config(MIDDLE, DENSE), models, machine, GPUS)
    ]
    assert all({"actor.layout.first_rank=0", "actor.layout.ranks=null"} <= set(p.overrides) for p in moved)
    stays, goes = (nearest_fit(config, models, machine, GPUS, everywhere=everywhere) for everywhere in (False, True))
    assert stays is None  # half of the ranks would be idle
    assert goes is not None and goes.overrides == ("actor.layout.first_rank=0", "actor.layout.ranks=null")


def test_remedy_names_larger_machines() -> None:
    """The remedy is twice or four times the number of the same machines, or else larger machines of the table."""
    config, models = load_config(MIDDLE, [*DENSE, "actor.layout.ranks=6"]), models_of("dense")
    least = min(t.plan.fullest.peak for t in everything("dense") if t.is_near)
    counts = []
    for share in (0.95, 0.85, 0.5):
        machine = with_room(share * least)
        message, proposal = remedy(config, models, machine, GPUS)
        others = [(machine, 12), (machine, 24), (MACHINES["a100-40"], 6)]
        first = next((m, n) for m, n in others if nearest_fit(config, models, m, n, everywhere=True) is not None)
        assert proposal is not None and (proposal.machine, proposal.gpus) == (first[0].name, first[1])
        changes = f" with {' '.join(proposal.overrides)}" if proposal.overrides else ""
        assert message == f"no layout on 6 x h100 fits; {first[1]} x {first[0].name} would fit{changes}"
        counts.append(first[1])
    assert counts == [12, 24, 6]


@pytest.mark.parametrize(
    ("millions", "machine", "would_do"),
    [
        (120, "a100-40", "6 x a100-80"), (120, "l40s", "6 x a100-80"), (145, "a100-40", "12 x a100-80"),
        (160, "a100-40", "24 x a100-80"), (230, "a100-40", "6 x h200"), (230, "h20", "6 x h200"),
        (330, "h100", "12 x b200"), (500, "a100-40", None),
    ],
)  # fmt: skip
def test_larger_machines_by_vocabulary(millions: int, machine: str, would_do: str | None) -> None:
    """The parameter is millions of tokens of a vocabulary. A hundred million need 54, 47 or 43 GB on each of 6, 12 or
    24 devices, because the heads limit the tensor parallel ranks."""
    model = arch(vocab_size=millions * 10**6)
    message, proposal = remedy(load_config(MIDDLE, DENSE), Models(model, model, model), MACHINES[machine], GPUS)
    assert (None if proposal is None else f"{proposal.gpus} x {proposal.machine}") == would_do
    assert (would_do or "nor on four times the number; shorten the response") in message


@pytest.mark.parametrize(
    ("fraction", "expected"), [("0.75", 0.3), ("0.4", 0.3), ("0.36", 0.3), ("0.3", None), ("null", 0.3)]
)
def test_memory_fraction_of_colocated_servers_is_lowered(fraction: str, expected: float | None) -> None:
    """Of 10 GB, a twentieth and 3 GB stay free. Another process has 3 GB, and the roles need 0.3 GB. 3.2 GB remain for
    servers. The first candidate is the next tenth below the setting or the default of 0.6."""
    servers = "{}" if fraction == "null" else f"{{memory_fraction: {fraction}}}"
    dense = [override for override in DENSE if override != "rollout.engine=transformers"]
    config = load_config(MIDDLE, [*dense, f"rollout.servers={servers}"])
    machine = dataclasses.replace(MACHINES["h100"], memory_bytes=10e9)
    nearest = nearest_fit(config, models_of("dense"), machine, GPUS)
    assert nearest is not None
    assert nearest.overrides == (() if expected is None else (f"rollout.servers.memory_fraction={expected}",))
    smaller = dataclasses.replace(machine, memory_bytes=6.8e9)  # less than a tenth remains
    assert nearest_fit(config, models_of("dense"), smaller, GPUS) is None
