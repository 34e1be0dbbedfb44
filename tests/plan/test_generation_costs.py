"""Costs of generation, weight syncs and offloading, counted by hand. Each machine has one finite resource."""

from __future__ import annotations

from typing import Any

import pytest

from megappo.config.sections.roles import OffloadSettings
from megappo.families.declaration import ArchitectureConfig
from megappo.plan.costs import StageCost, forward_cost, rollout_cost, sync_cost, update_cost
from megappo.plan.hardware.machines import Machine
from megappo.plan.inputs import RoleSetup, Setup
from tests.support.costs import (
    LAUNCH_SECONDS,
    D,
    F,
    H,
    K,
    P,
    Q,
    Stage,
    about,
    arithmetic,
    launched_layers,
    layer_weights,
    memory_bytes,
    sent_bytes,
)
from tests.support.plan import (
    HEADS,
    KV_HEADS,
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
