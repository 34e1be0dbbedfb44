"""The search finds what trying every setting finds: the fastest that fit, and the one nearest to what was given."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest

from megappo.config import Config, ConfigError, load_config
from megappo.config.roles import OffloadSettings
from megappo.plan.inputs import Models, RoleSettings
from megappo.plan.machines import MACHINES, Machine
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
    "rollout.engine=transformers", "rollout.sglang=null", "data.max_prompt_tokens=40", "rollout.max_response_tokens=60",
    "rollout.prompts_per_step=96", "rollout.generate_batch_sequences=6",
)  # fmt: skip
BATCHES = (6, 3, 1)


def role_words(role: str, layout: str) -> tuple[str, ...]:
    return (
        f"{role}.layout={{{layout}}}", f"{role}.minibatch_sequences=48", f"{role}.microbatch_budget_tokens=300",
        f"{role}.optimizer.distributed=false",
    )  # fmt: skip


WHOLE = "sequence_parallel: false"
GIVEN = (*PLAIN, *STEP, *role_words("actor", f"{WHOLE}, pipeline_parallel: 2, virtual_pipeline_chunks: 3"))
SEQUENCE = (*PLAIN, *STEP, *role_words("actor", "tensor_parallel: 3, sequence_parallel: true"))
SHARED = (*PLAIN, *STEP, *role_words("actor", f"{WHOLE}, context_parallel: 2"))
BOTH = (*STEP, *role_words("actor", "pipeline_parallel: 2"), *role_words("critic", "tensor_parallel: 3"))
CASES = {"dense": GIVEN, "sequence": SEQUENCE, "context": SHARED, "experts": GIVEN}


def settings(given: RoleSettings, experts: int, *, for_speed: bool = True) -> Iterator[RoleSettings]:
    """Every setting of a role of six layers and three key and value heads that the search may try. A pipeline keeps its
    chunks where they divide the layers, and what shards may be turned on where it was turned off. For speed none or as
    many ranks share out samples, and nothing or everything leaves the device while the role rests."""
    budgets = {given.microbatch_budget_tokens, *(LONGEST * 2**n for n in range(4))}
    shares = [n for n in range(1, experts + 1) if experts % n == 0] or [1]
    distributed_too = (False, None) if given.optimizer.distributed is False else (given.optimizer.distributed,)
    said = given.layout.sequence_parallel
    everything = OffloadSettings(weights=True, gradients=True, optimizer=True)
    offloads = (given.offload, everything) if for_speed else (given.offload,)
    contexts = {given.layout.context_parallel, 1} if for_speed else {given.layout.context_parallel}
    for tp, pp, ep, cp in itertools.product((1, 3), (1, 2, 3, 6), shares, contexts):
        chunks = given.layout.virtual_pipeline_chunks if pp == 2 else 1
        layout: dict[str, Any] = {"tensor_parallel": tp, "pipeline_parallel": pp, "expert_parallel": ep}
        layout["context_parallel"] = cp
        layout["virtual_pipeline_chunks"] = chunks
        for layout["sequence_parallel"] in (False, None) if said is False else (said if tp > 1 else None,):
            switches = itertools.product(RECOMPUTE, budgets, distributed_too, offloads)
            for recompute, budget, distributed, offload in switches:
                changes = {"recompute": recompute, "microbatch_budget_tokens": budget, "offload": offload}
                optimizer = given.optimizer.model_copy(update={"distributed": distributed})
                placed = given.layout.model_copy(update=layout)
                yield given.model_copy(update={**changes, "optimizer": optimizer, "layout": placed})


def distance(before: RoleSettings, after: RoleSettings) -> float:
    """Doublings of TP, PP, CP and EP and what leaves the device, half of those of the budget and of steps of
    recomputation, a quarter of switches."""
    found = float(before.offload != after.offload)
    for size in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        found += abs(math.log2(getattr(before.layout, size)) - math.log2(getattr(after.layout, size)))
    found += abs(math.log2(before.microbatch_budget_tokens) - math.log2(after.microbatch_budget_tokens)) / 2
    found += abs(RECOMPUTE.index(before.recompute) - RECOMPUTE.index(after.recompute)) / 2
    switches = (
        before.layout.sequence_parallel != after.layout.sequence_parallel,
        before.optimizer.distributed != after.optimizer.distributed,
    )
    return found + sum(switches) / 4


def sizes(role: RoleSettings) -> tuple[int, int]:
    return role.layout.tensor_parallel, role.layout.pipeline_parallel


def contexts(role: RoleSettings) -> int:
    return role.layout.context_parallel


def planned(config: Config, models: Models, machine: Machine = MACHINES["h100"]) -> Plan | None:
    """None where the rules refuse it."""
    try:
        return make_plan(config, models, machine, GPUS)
    except ConfigError:
        return None


class Tried(NamedTuple):
    """Settings and what became of them."""

    sizes: tuple[int, int]
    changes: float
    plan: Plan
    is_near: bool
    """Whether the search for what is nearest may try it: what only the one for speed varies is as it was given."""


@cache
def everything(case: str) -> tuple[Tried, ...]:
    """All settings of the actor and of the engine's batch."""
    config, found = load_config(MIDDLE, CASES[case]), []
    for actor in settings(config.actor, models_of(case).actor.experts):
        for halvings, batch in enumerate(BATCHES):
            rollout = config.rollout.model_copy(update={"generate_batch_sequences": batch})
            plan = planned(config.model_copy(update={"actor": actor, "rollout": rollout}), models_of(case))
            if plan is not None:
                near = actor.offload == config.actor.offload and contexts(actor) == contexts(config.actor)
                found.append(Tried(sizes(actor), distance(config.actor, actor) + halvings / 2, plan, near))
    return tuple(found)


def models_of(case: str) -> Models:
    model = with_experts(experts=3, experts_per_token=2) if case == "experts" else arch()
    return Models(model, model, model)


def with_room(usable_bytes: float) -> Machine:
    """An H100 of which a plan may fill so much."""
    machine = dataclasses.replace(MACHINES["h100"], memory_bytes=(usable_bytes + 3e9) / 0.95)
    assert machine.usable_bytes == pytest.approx(usable_bytes)
    return machine


@pytest.mark.parametrize(
    ("share", "case"),
    cases(
        itertools.product([1.0, 0.6, 0.3, 0.1, 0.03, 0.01, 0.003], CASES),
        quick=[(0.3, "dense"), (0.01, "sequence")],
    ),
)
def test_the_search_finds_the_best(share: float, case: str) -> None:
    """Memory is so small that a share of all settings fits."""
    models, given = models_of(case), CASES[case]
    config = load_config(MIDDLE, given)
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
        changed = load_config(MIDDLE, [*given, *proposal.overrides])
        found = make_plan(changed, models, machine, GPUS)
        assert (found.step_seconds, found.fullest.peak) == (proposal.step_seconds, proposal.peak_bytes)
        assert found.fits and (proposal.machine, proposal.gpus) == ("h100", GPUS)
        assert proposal.roles == {"actor": words(changed)}
    if nearest is not None:
        changes, seconds = min(near)
        assert nearest.step_seconds == pytest.approx(seconds, rel=1e-12)
        changed = load_config(MIDDLE, [*given, *nearest.overrides])
        halvings = BATCHES.index(changed.rollout.generate_batch_sequences)
        assert distance(config.actor, changed.actor) + halvings / 2 == pytest.approx(changes)


@pytest.mark.parametrize("reference", ["reference={}", "reference=null"])
@pytest.mark.parametrize("share", cases([1.0, 0.5, 0.3], quick=(0.5,)))
def test_no_change_of_a_role_alone_is_better(reference: str, share: float) -> None:
    """With actor, critic and reference, in a share of the memory that the fastest settings need."""
    given = [*BOTH, reference, *(["algorithm.kl_in_reward=null"] if reference == "reference=null" else [])]
    config, models = load_config(MIDDLE, given), Models(arch(), arch(hidden_size=61), arch(hidden_size=83))
    (fastest,) = best_layouts(config, models, MACHINES["h100"], GPUS, count=1)
    machine = with_room(share * fastest.peak_bytes * 1.000001)
    nearest = nearest_fit(config, models, machine, GPUS)
    proposals = best_layouts(config, models, machine, GPUS, count=3)
    assert nearest is not None and proposals
    for proposal in (*proposals, nearest):
        there = load_config(MIDDLE, [*given, *proposal.overrides])
        assert there.critic is not None
        for name, its in (("actor", there.actor), ("critic", there.critic)):
            before: RoleSettings = getattr(config, name)
            for other in settings(before, 0, for_speed=proposal is not nearest):
                if proposal is not nearest and sizes(other) != sizes(its):
                    continue
                closer = distance(before, other) - distance(before, its)
                if proposal is nearest and closer > 0:
                    continue
                plan = planned(there.model_copy(update={name: other}), models, machine)
                if plan is not None and plan.fits:
                    assert (proposal is not nearest or closer == 0) and plan.step_seconds >= proposal.step_seconds * (
                        1 - 1e-12
                    )


def words(config: Config) -> str:
    actor = config.actor
    kinds = ("tensor", "pipeline", "expert", "context")
    tp, pp, ep, cp = (getattr(actor.layout, f"{kind}_parallel") for kind in kinds)
    said = [f"TP {tp} x PP {pp} x DP {GPUS // tp // pp // cp}"] + [f"CP {cp}"] * (cp > 1)
    said += [f"EP {ep}"] * (ep > 1) + ["sequence parallel"] * actor.layout.shards_sequences
    said += ["distributed optimizer"] * actor.optimizer.shards_state(actor.layout.grid(GPUS))
    said += ["offload between uses"] * bool(actor.offload.parts)
    return ", ".join([*said, f"recompute {actor.recompute}", f"{actor.microbatch_budget_tokens} tokens"])


def test_roles_on_some_ranks_are_moved_to_all() -> None:
    config = load_config(MIDDLE, [*GIVEN, "actor.layout.first_rank=2", "actor.layout.ranks=4"])
    models, machine = models_of("dense"), MACHINES["h100"]
    moved = best_layouts(config, models, machine, GPUS)
    assert [p.step_seconds for p in moved] == [
        p.step_seconds for p in best_layouts(load_config(MIDDLE, GIVEN), models, machine, GPUS)
    ]
    assert all({"actor.layout.first_rank=0", "actor.layout.ranks=null"} <= set(p.overrides) for p in moved)
    stays, goes = (nearest_fit(config, models, machine, GPUS, everywhere=everywhere) for everywhere in (False, True))
    assert stays is None  # half of the ranks would have nothing to do
    assert goes is not None and goes.overrides == ("actor.layout.first_rank=0", "actor.layout.ranks=null")


def test_what_else_would_do() -> None:
    """Twice and four times as many of the same, then larger ones of the table."""
    config, models = load_config(MIDDLE, [*GIVEN, "actor.layout.ranks=6"]), models_of("dense")
    least = min(t.plan.fullest.peak for t in everything("dense") if t.is_near)
    found = []
    for share in (0.95, 0.85, 0.5):
        machine = with_room(share * least)
        said, proposal = remedy(config, models, machine, GPUS)
        others = [(machine, 12), (machine, 24), (MACHINES["a100-40"], 6)]
        first = next((m, n) for m, n in others if nearest_fit(config, models, m, n, everywhere=True) is not None)
        assert proposal is not None and (proposal.machine, proposal.gpus) == (first[0].name, first[1])
        changes = f" with {' '.join(proposal.overrides)}" if proposal.overrides else ""
        assert said == f"no layout on 6 x h100 fits; {first[1]} x {first[0].name} would fit{changes}"
        found.append(first[1])
    assert found == [12, 24, 6]


@pytest.mark.parametrize(
    ("millions", "machine", "would_do"),
    [
        (120, "a100-40", "6 x a100-80"),
        (120, "l40s", "6 x a100-80"),
        (145, "a100-40", "12 x a100-80"),
        (160, "a100-40", "24 x a100-80"),
        (230, "a100-40", "6 x h200"),
        (230, "h20", "6 x h200"),
        (330, "h100", "12 x b200"),
        (500, "a100-40", None),
    ],
)
def test_larger_machines(millions: int, machine: str, would_do: str | None) -> None:
    """Words of a vocabulary: a hundred million need 54, 47 or 43 GB on each of 6, 12 or 24 devices, as no more than
    the heads share its matrices out."""
    model = arch(vocab_size=millions * 10**6)
    said, proposal = remedy(load_config(MIDDLE, GIVEN), Models(model, model, model), MACHINES[machine], GPUS)
    assert (None if proposal is None else f"{proposal.gpus} x {proposal.machine}") == would_do
    assert (would_do or "nor on four times the number; shorten the response") in said


@pytest.mark.parametrize(("given", "found"), [("0.75", 0.3), ("0.4", 0.3), ("0.36", 0.3), ("0.3", None), ("null", 0.3)])
def test_servers_beside_trainers_get_less(given: str, found: float | None) -> None:
    """Of 10 GB a twentieth and 3 GB are kept free and 3 GB are another process's, and the roles need 0.3 GB: 3.2 GB are
    left to servers. The next tenth below what is given, or the default of 0.6, is tried first."""
    servers = "null" if given == "null" else f"{{memory_fraction: {given}}}"
    config = load_config(MIDDLE, [*GIVEN, "rollout.engine=sglang", f"rollout.sglang={servers}"])
    machine = dataclasses.replace(MACHINES["h100"], memory_bytes=10e9)
    nearest = nearest_fit(config, models_of("dense"), machine, GPUS)
    assert nearest is not None
    assert nearest.overrides == (() if found is None else (f"rollout.sglang.memory_fraction={found}",))
    smaller = dataclasses.replace(machine, memory_bytes=6.8e9)  # less than a tenth of it is left
    assert nearest_fit(config, models_of("dense"), smaller, GPUS) is None
