"""Costs of the stages of a step, counted by hand: FLOPs, bytes and launches. Each machine has one finite resource."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megappo.config import load_config
from megappo.families.declaration import ArchitectureConfig
from megappo.plan.costs import StageCost, first_bucket_share, forward_cost, update_cost
from megappo.plan.hardware.machines import Machine
from megappo.plan.inputs import RoleSetup, make_setup
from megappo.plan.planner import read_models
from tests.support.costs import (
    TRAINER_LAUNCH_SECONDS,
    D,
    F,
    H,
    K,
    Q,
    T,
    about,
    arithmetic,
    launched_layers,
    layer_weights,
    memory_bytes,
    sent_bytes,
)
from tests.support.places import QUICKSTART
from tests.support.plan import PADDED_VOCAB, PER_TOKEN, RESPONSE, VOCAB, arch, machine, role, with_experts, work


def large(**changes: Any) -> ArchitectureConfig:
    """Return a model with several buckets."""
    return arch(hidden_size=2048, ffn_hidden_size=6144, **changes)


def slow(**changes: Any) -> Machine:
    """Return a machine with finite arithmetic and the given changes."""
    return machine(bfloat16_flops=1e12, devices_per_node=100, **changes)


def plain_seconds(setup: RoleSetup) -> float:
    """Return the seconds of the kernels of all updates. Each slot of the pipeline runs one microbatch."""
    return update_cost(setup, work(), slow()).seconds


def rank_weights(model: ArchitectureConfig, tp: int) -> int:
    """Return the weights of three layers on one of `tp` ranks, without experts."""
    matrices = H * (Q + 2 * K) + Q * H + (0 if model.experts else 3 * H * F)
    return 3 * (matrices // tp + model.experts * H + 2 * H + 2 * D)


def forward(model: ArchitectureConfig) -> tuple[float, float]:
    """Return the FLOPs of a token in a layer, and the FLOPs of its attention. Each layer includes a sixth of the final
    norm. Attention computes 30 scores per head, and their product with the values."""
    attention = 2 * 2 * T * Q
    return 2 * (layer_weights(model) + H / 6) + attention, attention


@pytest.mark.parametrize("model", [arch(), with_experts()], ids=["dense", "experts"])
@pytest.mark.parametrize("critic", [False, True])
def test_scoring(model: ArchitectureConfig, critic: bool) -> None:
    """A replica scores 26 sequences, two at a time. The 13 microbatches have 60 tokens, 38 of them in responses. One
    more slot fills the second stage."""
    setup = role(model, name="critic" if critic else "actor")

    def stage(m: Machine) -> StageCost:
        return forward_cost([setup], work(), m)

    layer, head = forward(model)[0], 2 * H * (1 if critic else VOCAB)
    assert arithmetic(stage) == about(14 * (3 * 60 * layer + 38 * head) / 3)
    assert stage(machine()).flops == about(104 * (T * 6 * layer + RESPONSE * head))
    heaviest = rank_weights(model, 3) + 34 * H + (0 if critic else H) + 3 * model.experts * 3 * H * F
    wide = 8 * H + 6 * Q + (PER_TOKEN * (3 * F + 4 * H) if model.experts else 3 * F)
    assert memory_bytes(stage) == about(14 * (2 * heaviest + 2 * 2 * 60 * 3 * wide / 3))
    assert launched_layers(stage, TRAINER_LAUNCH_SECONDS) == about(14 * 3 * (2.2 if model.experts else 1))
    assert stage(machine()).name == "forward"


def test_omitted_scores_cost_nothing() -> None:
    """If the actor scores in every fourth step, a step has a quarter of the cost. Values are needed in every step."""
    every, fourth = (forward_cost([role(scored_steps=part)], work(), machine()) for part in (1.0, 0.25))
    assert fourth.flops == about(every.flops / 4) and fourth.seconds == about(every.seconds / 4)
    config = load_config(QUICKSTART, ["algorithm.old_logprob=bypass", "algorithm.mismatch_every_steps=4"])
    setup = make_setup(config, read_models(config, None).models, 2, on_cuda=False)
    assert [r.scored_steps for r in setup.roles] == [0.25, 1.0]


def test_roles_score_one_after_the_other() -> None:
    roles = [role(), role(name="critic")]
    together = forward_cost(roles, work(), machine(memory_bandwidth=1.0))
    apart = [forward_cost([r], work(), machine(memory_bandwidth=1.0)) for r in roles]
    for part in ("seconds", "flops", "memory_bytes", "link_bytes"):
        assert getattr(together, part) == about(sum(getattr(cost, part) for cost in apart))


@pytest.mark.parametrize(("recompute", "passes"), [("none", 3), ("selective", 3), ("full", 4)])
@pytest.mark.parametrize("critic", [False, True])
def test_updates(recompute: str, passes: int, critic: bool) -> None:
    """There are three minibatches. In each, a replica has seven sequences in four microbatches of 52.5 tokens on
    average."""
    setup = role(recompute=recompute, name="critic" if critic else "actor")

    def stage(m: Machine) -> StageCost:
        return update_cost(setup, work(), m)

    layer, attention = forward(arch())
    layer_flops = 3 * layer + {"none": 0, "selective": attention, "full": layer}[recompute]
    head = 2 * H * 3 if critic else 2 * H * VOCAB * 4  # the logits are computed twice
    assert arithmetic(stage) == about(3 * 5 * (3 * 52.5 * layer_flops + 33.25 * head) / 3)
    assert stage(machine()).flops == about(3 * 28 * (T * 6 * layer_flops + RESPONSE * head))
    heaviest = rank_weights(arch(), 3) + 34 * H + (0 if critic else H)
    moved = passes * (2 * heaviest + 2 * 2 * 52.5 * 3 * (8 * H + 3 * F + 6 * Q) / 3)
    gradients = (4 + 4) * heaviest  # accumulated in each microbatch
    adam = (4 + 3 * 4 + 3 * 4 + 2) * heaviest
    assert memory_bytes(stage) == about(3 * 5 * (moved + gradients) + 3 * adam)
    assert launched_layers(stage, TRAINER_LAUNCH_SECONDS) == about(3 * 5 * 3 * passes)
    assert stage(machine()).name == f"update_{setup.name}"


def test_recomputation_is_counted() -> None:
    """The recomputation of the MLP adds the three matrices of SwiGLU for every token."""
    plain = update_cost(role(), work(), machine()).flops
    again = update_cost(role(recompute="selective", recompute_modules=("mlp",)), work(), machine()).flops
    assert again - plain == about(3 * 28 * T * 6 * 2 * 3 * H * F)


@pytest.mark.parametrize("distributed", [False, True])
def test_updates_of_experts(distributed: bool) -> None:
    """Each rank has two of twelve experts in each of three layers. One other rank has the same experts. The pipeline
    has three chunks."""
    setup = role(with_experts(), ep=6, vpp=3, distributed_optimizer=distributed, dtype_bytes=4)

    def stage(m: Machine) -> StageCost:
        return update_cost(setup, work(), m)

    shared, experts = rank_weights(with_experts(), 3) + 34 * H + H, 3 * 2 * 3 * H * F
    wide = 8 * H + 6 * Q + PER_TOKEN * (3 * F + 4 * H)
    moved = 3 * (4 * (shared + experts) + 2 * 4 * 52.5 * 3 * wide / 3) + 8 * (shared + experts)
    sharded = shared / 4 + experts / 2 if distributed else shared + experts
    assert memory_bytes(stage) == about(3 * (4 + 1 / 3) * moved + 3 * (4 + 12 + 12 + 4) * sharded)
    assert launched_layers(stage, TRAINER_LAUNCH_SECONDS) == about(3 * (4 + 1 / 3) * 3 * 3 * 2.2)
    replayed = replace(setup, routing_bytes=8)
    launched = launched_layers(lambda m: update_cost(replayed, work(), m), TRAINER_LAUNCH_SECONDS)
    assert launched == about(3 * (4 + 1 / 3) * 3 * 3 * 2.5)
    reduced = 3 / 4 * shared + 1 / 2 * experts
    all_reduce, scatter_and_gather = 2 * 4, 4 + 4
    updates = 3 * reduced * (scatter_and_gather if distributed else all_reduce)
    slots, hidden = 3 * (4 + 1 / 3), 52.5 * H * 4
    tensor = 3 * 2 * 2 * 2 * (2 / 3) * hidden  # layers, all-reduces, ways, ring
    to_experts = 3 * 2 * 2 * PER_TOKEN * hidden / 3 * 5 / 6
    assert sum(sent_bytes(stage, 7)) == about(slots * (tensor + to_experts + 2 * hidden) + updates)


@pytest.mark.parametrize(("recompute", "ways"), [("none", 2), ("full", 3)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("devices", [7, 8, 11, 14, 29])
def test_links_of_updates(recompute: str, ways: int, sequence_parallel: bool, devices: int) -> None:
    """Ranks 5 to 7 are tensor parallel. Ranks 5 to 10 are a replica. Ranks 5 to 28 sum gradients. Each of these groups
    is inside a node or not. Ranks 5 to 7 and 11 to 13 share the experts. Some of these ranks are in the node of the
    first rank."""
    setup = role(with_experts(), ep=6, sequence_parallel=sequence_parallel, recompute=recompute)
    hidden, slots = 52.5 * H * 2, 3 * 5
    gathers = ways * 2 * 2 + (2 if sequence_parallel else 0)  # an all-reduce is a scatter and a gather
    sent = {
        7: slots * 3 * gathers * 2 / 3 * hidden,
        10: slots * 2 * hidden / (3 if sequence_parallel else 1),
        28: 3 * 8 * (3 / 4 * (rank_weights(with_experts(), 3) + 35 * H) + 1 / 2 * 3 * 2 * 3 * H * F),
    }
    inside = sum(n for last, n in sent.items() if last < devices)
    outside = sum(sent.values()) - inside
    to_experts = slots * 3 * ways * 2 * PER_TOKEN * hidden / 3 / 6  # of one other rank
    near = {7: 1, 8: 2, 11: 2, 14: 5, 29: 5}[devices]
    actual = sent_bytes(lambda m: update_cost(setup, work(), m), devices)
    assert actual == (
        pytest.approx(inside + near * to_experts, abs=1e-3),
        pytest.approx(outside + (5 - near) * to_experts, abs=1e-3),
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_links_of_scoring(sequence_parallel: bool) -> None:
    setup = role(with_experts(), ep=6, sequence_parallel=sequence_parallel)
    hidden = 60 * H * 2
    tensor, to_experts = 3 * 2 * 2 * 2 / 3 * hidden, 3 * 2 * PER_TOKEN * hidden / 3 * 5 / 6
    sent = 14 * (tensor + to_experts + hidden / (3 if sequence_parallel else 1))
    assert sent_bytes(lambda m: forward_cost([setup], work(), m), 29) == (about(sent), 0)


@pytest.mark.parametrize(("dp", "passes"), [(1, 1), (4, 1 + 3 * 26 / 104)])
def test_replayed_routing_is_sent(dp: int, passes: float) -> None:
    """The routing of three layers is sent once to each replica for the forward pass. With several replicas, the routing
    is sent again for the minibatches."""
    plain, replayed = (
        forward_cost([role(with_experts(), dp=dp, ep=3, routing_bytes=n)], work(), machine()).link_bytes for n in (0, 5)
    )
    assert replayed - plain == about(passes * 5 * 3 * 104 / dp * T)


@pytest.mark.parametrize(("recompute", "ways"), [("none", 2), ("selective", 3), ("full", 3)])
def test_links_of_context_parallel_ranks(recompute: str, ways: int) -> None:
    """Five adjacent ranks gather keys and values of all tokens in each of three layers. The backward pass sends the
    same number of bytes. Ten ranks have the same weights."""
    setup = role(tp=1, pp=2, dp=2, cp=5, recompute=recompute)
    tokens = 13 * T / 7 / 5  # seven microbatches
    keys = 3 * 8 * 3 * ways * 4 * tokens * 2 * K * 2
    gradients = 3 * 8 * 9 / 10 * (rank_weights(arch(), 1) + PADDED_VOCAB * H + H)
    stages = 3 * 8 * 2 * tokens * H * 2
    actual = sent_bytes(lambda m: update_cost(setup, work(), m), 10)
    assert actual == (pytest.approx(keys, abs=1e-3), pytest.approx(gradients + stages, abs=1e-3))


def test_context_parallel_ranks_share_the_arithmetic() -> None:
    alone, three = (role(tp=1, cp=cp, dp=1, microbatch_budget_tokens=36) for cp in (1, 3))
    for cost in (lambda r: lambda m: update_cost(r, work(), m), lambda r: lambda m: forward_cost([r], work(), m)):
        assert arithmetic(cost(three)) == about(arithmetic(cost(alone)) / 3)
        assert cost(three)(machine()).flops == cost(alone)(machine()).flops


def test_role_on_one_rank_sends_nothing() -> None:
    alone = role(tp=1, pp=1, dp=1)
    assert update_cost(alone, work(), machine()).link_bytes == 0
    assert update_cost(alone, work(), machine(intra_node_bandwidth=1.0)).bound_by == "launches"


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(("recompute", "backward"), [("none", 2 / 3), ("full", 3 / 4)])
def test_overlap_hides_sums_behind_backward_and_gathers_behind_forward(
    distributed: bool, recompute: str, backward: float
) -> None:
    """All communication overlaps except one bucket of forty million elements, in the last microbatch of each update.
    The test covers communication that is shorter and longer than the computation."""
    setup = role(large(), tp=1, pp=1, distributed_optimizer=distributed, recompute=recompute)
    setup = replace(setup, reduces_in_backward=True, gathers_in_forward=distributed)
    n = setup.parameters(0)
    kernels = plain_seconds(setup)
    microbatch = kernels / (3 * 4)
    later = 1 - 40e6 / n
    for seconds_of_4_bytes in (0.01 * microbatch, 1e4 * microbatch):
        m = slow(intra_node_bandwidth=3 / 4 * 4 * n / 0.7 / seconds_of_4_bytes)
        sums = (1 if distributed else 2) * seconds_of_4_bytes
        hidden = 3 * later * min(sums, backward * microbatch)
        hidden += 2 * later * min(seconds_of_4_bytes / 2, (1 - backward) * microbatch) if distributed else 0
        sent = 3 * (sums + (seconds_of_4_bytes / 2 if distributed else 0))
        cost = update_cost(setup, work(), m)
        assert cost.hidden_seconds == pytest.approx(hidden, rel=1e-6)
        assert cost.seconds == pytest.approx(kernels + sent - hidden, rel=1e-6)


@pytest.mark.parametrize("bandwidth", [1e3, 1e6, 1e9, 1e12])
@pytest.mark.parametrize("model", [arch(), with_experts(), large(), large(tied_embeddings=True)])
def test_overlap_hides_at_most_the_smaller_part(model: ArchitectureConfig, bandwidth: float) -> None:
    changes = {"ep": 6 if model.experts else 1, "distributed_optimizer": True}
    m = slow(intra_node_bandwidth=bandwidth, inter_node_bandwidth=bandwidth)
    apart, sums, both = (
        update_cost(role(model, **changes, reduces_in_backward=reduces, gathers_in_forward=gathers), work(), m)
        for reduces, gathers in ((False, False), (True, False), (True, True))
    )
    assert apart.hidden_seconds == 0
    for faster, slower in ((sums, apart), (both, sums)):
        assert faster.seconds <= slower.seconds and faster.link_bytes == slower.link_bytes
        assert faster.seconds + faster.hidden_seconds == about(apart.seconds)
        assert faster.hidden_seconds <= min(plain_seconds(role(model, **changes)), apart.link_bytes / bandwidth / 0.7)
    on_cpu = update_cost(role(model, **changes, reduces_in_backward=True), work(), replace(m, is_cuda=False))
    assert (on_cpu.hidden_seconds, on_cpu.seconds) == (0, about(apart.seconds))


def test_one_bucket_hides_nothing() -> None:
    """The only bucket is full when the backward pass has ended."""
    small = role(reduces_in_backward=True, gathers_in_forward=True)
    assert first_bucket_share(small) == 1
    assert update_cost(small, work(), slow(intra_node_bandwidth=1.0, inter_node_bandwidth=1.0)).hidden_seconds == 0


def test_optimizer_on_the_host() -> None:
    """In each of three updates, gradients are sent and main weights are received in float32. The host reads or writes
    28 bytes per parameter. On a CPU nothing is transferred."""
    plain, offloaded = role(), role(on_host=0.5)
    shard = max(offloaded.parameters(stage) for stage in (0, 1))
    cost = update_cost(offloaded, work(), machine(host_bandwidth=1e-3))
    assert cost.host_bytes == 3 * shard / 2 * 8
    seconds = [update_cost(r, work(), machine(host_bandwidth=float("inf"))).seconds for r in (plain, offloaded)]
    assert seconds[1] - seconds[0] == pytest.approx(3 * shard / 2 * 28 / 50e9, rel=1e-6)
    moved = [update_cost(r, work(), machine(memory_bandwidth=1.0)).memory_bytes for r in (plain, offloaded)]
    assert moved[0] - moved[1] == about(3 * shard / 2 * 30)
    on_cpu = update_cost(offloaded, work(on_cuda=False), machine(is_cuda=False, host_bandwidth=1e-3))
    assert on_cpu.host_bytes == 0
