"""Costs of the stages of a step, counted by hand: FLOPs, bytes and launches. Each machine has one finite resource."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megappo.config import load_config
from megappo.config.roles import OffloadSettings
from megappo.families.architecture import ArchitectureConfig
from megappo.plan.costs import StageCost, first_bucket_share, forward_cost, rollout_cost, sync_cost, update_cost
from megappo.plan.inputs import RoleSetup, Setup, make_setup
from megappo.plan.machines import Machine
from megappo.plan.planner import read_models
from tests.support.places import QUICKSTART
from tests.support.plan import FFN as F
from tests.support.plan import HEAD_DIM as D
from tests.support.plan import (
    HEADS,
    KV_HEADS,
    PADDED_VOCAB,
    PER_TOKEN,
    RESPONSE,
    VOCAB,
    arch,
    machine,
    role,
    servers,
    with_experts,
    work,
)
from tests.support.plan import HIDDEN as H
from tests.support.plan import PROMPT as P

Stage = Callable[[Machine], StageCost]
Q, K = HEADS * D, KV_HEADS * D
T = P + RESPONSE
LAUNCH_SECONDS, TRAINER_LAUNCH_SECONDS = 0.4e-3, 1.4e-3


def about(number: float) -> object:
    return pytest.approx(number, rel=1e-9, abs=0)


def arithmetic(stage: Stage) -> float:
    """Return the FLOPs of the busiest rank."""
    cost = stage(machine(bfloat16_flops=1.0))
    assert cost.bound_by == "compute"
    return cost.seconds * 0.4


def memory_bytes(stage: Stage) -> float:
    """Return the bytes of memory traffic of the busiest rank."""
    cost = stage(machine(memory_bandwidth=1.0))
    assert cost.bound_by == "memory" and cost.seconds * 0.7 == about(cost.memory_bytes)
    return cost.memory_bytes


def launched_layers(stage: Stage, seconds: float = LAUNCH_SECONDS) -> float:
    """Return the number of layers with kernels that the host launches."""
    cost = stage(machine())
    assert cost.bound_by == "launches"
    return cost.seconds / seconds


def sent_bytes(stage: Stage, devices_per_node: int) -> tuple[float, float]:
    """Return the bytes that the busiest rank sends inside its node, and to other nodes."""
    sent = []
    waiting = stage(machine()).seconds
    for link in ("intra_node_bandwidth", "inter_node_bandwidth"):
        cost = stage(machine(**{link: 1e-3}, devices_per_node=devices_per_node))
        sent.append((cost.seconds - waiting) * 0.7e-3)
    assert sum(sent) == about(cost.link_bytes)
    return sent[0], sent[1]


def layer_weights(model: ArchitectureConfig) -> int:
    """Return the weights that a token uses in one layer: QKV, output matrix, SwiGLU or router and chosen experts, and
    norms."""
    feed_forward = model.experts * H + PER_TOKEN * 3 * H * F if model.experts else 3 * H * F
    return H * (Q + 2 * K) + Q * H + feed_forward + 2 * H + 2 * D


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


def totals(model: ArchitectureConfig) -> tuple[int, int, int]:
    """Return the weights of the whole model, the weights that a token uses in the layers and the final norm, and the
    weights of the output."""
    met = 6 * layer_weights(model) + H
    unmet = 6 * (model.experts - PER_TOKEN) * 3 * H * F if model.experts else 0
    return met + unmet + 2 * VOCAB * H, met, VOCAB * H


@pytest.mark.parametrize("model", [arch(), with_experts(), arch(kv_heads=HEADS)], ids=["dense", "experts", "heads"])
def test_generation_by_the_embedded_engine(model: ArchitectureConfig) -> None:
    """Thirteen sequences are generated in batches of five, five and three. A step reads the weights. For each sequence,
    a step reads keys and values of the context to attend, to append, and to repeat if several queries share them."""
    wider = 2 * 6 * H * (model.kv_heads - KV_HEADS) * D
    total, trunk, head = (n + more for n, more in zip(totals(model), (wider, wider, 0), strict=True))

    def stage(m: Machine) -> StageCost:
        return rollout_cost(model, work(), m)

    context, scores = P + RESPONSE / 2, 2 * 2 * 6 * Q
    prefill = 13 * (P * (2 * trunk + scores * P) + 2 * head)
    decode = 13 * RESPONSE * (2 * (trunk + head) + scores * context)
    assert arithmetic(stage) == about(prefill + decode)
    assert stage(machine()).flops == about(29 * (prefill + decode))
    cache = 2 * 2 * 6 * model.kv_heads * D * context
    touched = 3 if model.kv_heads == HEADS else 3 + 2 * 3
    logits = 8 * 4 * VOCAB
    assert memory_bytes(stage) == about(3 * (1 + RESPONSE) * 2 * total + 13 * RESPONSE * (touched * cache + logits))
    assert launched_layers(stage) == about(3 * 6 * (1 + RESPONSE))
    assert stage(machine()).link_bytes == 0 and stage(machine()).name == "rollout"


def test_embedded_engine_recomputes_the_prefix_of_turns() -> None:
    """The second of two turns begins after half of the response. Servers have the prefix in their cache."""
    _, trunk, head = totals(arch())
    half = P + RESPONSE // 2
    second = 13 * (half * (2 * trunk + 2 * 2 * 6 * Q * half) + 2 * head)
    costs = [rollout_cost(arch(), work(turns=turns), machine()) for turns in (1, 2)]
    assert costs[1].flops - costs[0].flops == about(29 * second)
    served = [rollout_cost(arch(), work(turns=turns, servers=servers()), machine()) for turns in (1, 2)]
    assert served[0] == served[1]


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize(("most", "running"), [(1000, 20.8), (7, 7)])
def test_generation_by_servers(cuda: bool, most: int, running: float) -> None:
    """There are five servers of two ranks. Each server runs 20.8 of 104 sequences if all have room, otherwise seven."""
    engine = servers(most_sequences=most)
    if running > 7:
        running = 21  # the number of sequences is an integer
    where = work(servers=engine, on_cuda=cuda)

    def stage(m: Machine) -> StageCost:
        return rollout_cost(arch(), where, m)

    total, trunk, head = totals(arch())
    norms = 6 * (2 * H + 2 * D) + H
    weights = (total - norms) / 2 + norms
    steps, context, scores = 20.8 * RESPONSE / running, P + RESPONSE / 2, 2 * 2 * 6 * Q
    prefill = 20.8 * (P * (2 * trunk + scores * P) + 2 * head)
    step = running * (2 * (trunk + head) + scores * context)
    waiting = steps * 2 * 6 * 10e-6 * 0.4  # for all-reduces
    assert arithmetic(stage) == about((prefill + steps * step) / 2 + waiting)
    assert stage(machine()).flops == about(5 * (prefill + steps * step))
    cache = running * context * 2 * 2 * 6 * 1.5 * D  # one and a half of three heads on each rank
    moved = 2 * weights + steps * (2 * weights + cache + 8 * running * VOCAB)
    assert stage(machine()).memory_bytes == about(moved)
    waiting = steps * 2 * 6 * 10e-6
    assert stage(machine(memory_bandwidth=1.0)).seconds == about(moved / 0.7 + waiting)
    launches = 0 if cuda else 6 * (1 + steps) * LAUNCH_SECONDS
    assert stage(machine()).seconds == about(launches + waiting)
    tokens = steps * running + 20.8 * P
    all_reduced = 2 * 6 * (2 * 1 / 2) * tokens * H * 2
    assert sent_bytes(stage, 1) == (about(all_reduced), 0)
    alone = rollout_cost(arch(), work(servers=servers(tensor_parallel=1)), machine())
    assert (alone.seconds, alone.link_bytes) == (0, 0)


def test_servers_may_share_a_machine_with_trainers() -> None:
    """Compare the arithmetic of a machine of which each rank of a trainer has a 29th. Servers on another machine have
    that machine alone. Five servers of two ranks on the same machine have a tenth each."""
    whole = machine(bfloat16_flops=29 * 16.0, shared_by_ranks=True)
    slow = []
    for shares in (False, True):
        engine = servers(
            colocated=False, shares_machine=shares, tensor_parallel=2, max_total_tokens=500, static_bytes=0
        )
        slow.append(rollout_cost(arch(), work(servers=engine, on_cuda=False), whole.per_rank(29)).seconds)
    on_gpu = rollout_cost(arch(), work(servers=engine, on_cuda=False), machine(bfloat16_flops=16.0)).seconds
    assert slow[0] == pytest.approx(on_gpu) and slow[1] == pytest.approx(slow[0] * 10 / 29, rel=1e-6)


def setup_of(actor: RoleSetup, **changes: object) -> Setup:
    return Setup(actor, None, None, work(**changes))


TWO_STAGES = role(tp=1, dp=2, first_rank=0)  # on ranks 0 to 3, the last rank on the second stage
OF_THREE_LAYERS = 3 * (H * (Q + 2 * K) + Q * H + 3 * H * F + 2 * H + 2 * D)
FIRST_BYTES = 2 * (OF_THREE_LAYERS + VOCAB * H)
LAST_BYTES = FIRST_BYTES + 2 * H  # the final norm


def test_sync_into_the_embedded_engine() -> None:
    """A rank receives the weights that other ranks have. A rank without a role receives all weights. The weights are
    read and written for joining, converting and copying."""

    def stage(m: Machine, actor: RoleSetup = TWO_STAGES, ranks: int = 4) -> StageCost:
        return sync_cost(setup_of(actor, world_size=ranks), m)

    assert memory_bytes(stage) == about(6 * (FIRST_BYTES + LAST_BYTES))
    assert sent_bytes(stage, 3) == (0, about(LAST_BYTES)) and sent_bytes(stage, 4) == (about(LAST_BYTES), 0)
    assert stage(machine(), ranks=5).link_bytes == FIRST_BYTES + LAST_BYTES
    one_stage = role(tp=1, pp=1, dp=4, first_rank=0)
    assert stage(machine(), one_stage).link_bytes == 0
    assert stage(machine()).seconds == 0 and stage(machine()).name == "sync"
    halves = role(tp=3, pp=1, dp=1, first_rank=0)  # the last rank has 33 of 101 rows of the vocabulary
    own = 6 * (H * (Q + 2 * K) + Q * H + 3 * H * F) // 3 + 6 * (2 * H + 2 * D) + H + 2 * 33 * H
    assert stage(machine(), halves, 3).link_bytes == FIRST_BYTES + LAST_BYTES - 2 * own
    experts = role(with_experts(), tp=1, pp=1, dp=2, ep=2, first_rank=0)
    assert stage(machine(), experts, 2).link_bytes == 2 * 6 * 6 * 3 * H * F


def test_sync_into_colocated_servers() -> None:
    """The cost is the gathering, which takes longer than the loading. One rank gathers whole tensors for each server.
    With slices, each trainer rank gathers for the server rank on its device. Without GPUs each rank of a copy writes
    its part into memory."""

    def stage(m: Machine, ranks: int = 6, on_cuda: bool = True, **changes: Any) -> StageCost:
        actor = role(tp=1, dp=ranks // 2, first_rank=0)
        engine = servers(count=2, tensor_parallel=3, sleeps=False, **changes)
        return sync_cost(setup_of(actor, world_size=ranks, servers=engine, on_cuda=on_cuda), m)

    assert memory_bytes(stage) == about(4 * (FIRST_BYTES + LAST_BYTES))
    assert sent_bytes(stage, 5) == (0, about(LAST_BYTES)) and sent_bytes(stage, 6) == (about(LAST_BYTES), 0)
    # Each of three ranks has a third of the matrices, all norms, and 64 of the 101 rows, which are padded to 192.
    matrices = 3 * (H * (Q + 2 * K) + Q * H + 3 * H * F) // 3
    of_slices = 2 * (matrices + 3 * (2 * H + 2 * D) + 64 * H + H)
    assert stage(machine(), sliced=True).link_bytes == of_slices
    assert stage(machine(memory_bandwidth=1.0), sliced=True).memory_bytes < 4 * (FIRST_BYTES + LAST_BYTES) / 2
    shared = stage(machine(memory_bandwidth=1.0), on_cuda=False, shares_machine=True)
    assert (shared.memory_bytes, shared.link_bytes) == (about(4 * (FIRST_BYTES + LAST_BYTES) / 2), 0)


def test_sync_waits_for_servers_to_wake() -> None:
    """The time is the time on the H100, for any number of bytes. Infinitely fast memory leaves no other time."""

    def stage(sleeps: bool) -> StageCost:
        engine = servers(sleeps=sleeps)
        return sync_cost(
            setup_of(role(tp=1, dp=1, first_rank=0), world_size=1, servers=engine, on_cuda=True), machine()
        )

    awake, asleep = stage(False), stage(True)
    assert 0.7 < asleep.seconds - awake.seconds < 0.9
    assert asleep.bound_by == "waking" != awake.bound_by


@pytest.mark.parametrize(("count", "of_the_busiest"), [(1, 1), (2, 1), (3, 2), (7, 4)])
@pytest.mark.parametrize("shares", [False, True])
def test_sync_into_servers_on_other_devices(count: int, of_the_busiest: int, shares: bool) -> None:
    """Each server receives the model. Two ranks of each stage broadcast their stage to the servers in turn."""
    link = "intra_node_bandwidth" if shares else "inter_node_bandwidth"
    engine = servers(count=count, colocated=False, shares_machine=shares)
    cost = sync_cost(setup_of(TWO_STAGES, world_size=4, servers=engine), machine(**{link: 1.0}, devices_per_node=10))
    assert cost.seconds * 0.7 == about(max(FIRST_BYTES + LAST_BYTES, of_the_busiest * LAST_BYTES))


def test_sending_ranks_for_remote_servers() -> None:
    """There are two nodes of two ranks. Only ranks of the first node reach servers on that node, with one rank of each
    stage. All ranks reach servers that have no room on a node, and servers of `urls`."""
    nodes = machine(inter_node_bandwidth=1.0, devices_per_node=2)

    def sent(**changes: Any) -> float:
        engine = servers(count=2, tensor_parallel=1, colocated=False, **changes)
        return sync_cost(setup_of(TWO_STAGES, world_size=4, servers=engine), nodes).seconds * 0.7

    whole = FIRST_BYTES + LAST_BYTES
    assert sent() == about(2 * LAST_BYTES) and sent(reached_from_everywhere=True) == about(whole)
    seven = servers(count=7, colocated=False)
    cost = sync_cost(setup_of(TWO_STAGES, world_size=4, servers=seven), nodes)
    assert cost.seconds * 0.7 == about(4 * LAST_BYTES)


def moved_bytes(stage: Stage) -> float:
    """Return the bytes between a device and its host."""
    cost = stage(machine(host_bandwidth=1e-3))
    assert cost.bound_by == "host"
    waiting = stage(machine(host_bandwidth=float("inf"))).seconds
    assert (cost.seconds - waiting) * 0.7e-3 == about(cost.host_bytes)
    return cost.host_bytes


def test_offloaded_state_is_transferred() -> None:
    """Weights are loaded for a pass. All state is loaded and offloaded for the updates of a step. A sync reads the
    weights on the host."""
    everything = role(offload=OffloadSettings(weights=True, gradients=True, optimizer=True))
    reference = role(name="reference", trained=False, offload=OffloadSettings(weights=True))
    weights = 2 * max(everything.parameters(stage) for stage in (0, 1))
    assert moved_bytes(lambda m: forward_cost([everything, reference], work(), m)) == 2 * weights
    assert moved_bytes(lambda m: update_cost(everything, work(), m)) == 2 * (weights + 6 * weights)
    for served in (None, servers()):
        setup = Setup(everything, None, None, work(servers=served))
        assert sync_cost(setup, machine(host_bandwidth=1.0)).host_bytes == weights
    assert update_cost(role(offload=OffloadSettings(gradients=True)), work(), machine()).host_bytes == 0


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
