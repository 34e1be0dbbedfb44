"""Memory of every rank, counted by hand on odd sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megappo.config.sections.roles import OffloadSettings
from megappo.families.declaration import ArchitectureConfig
from megappo.plan.bytes.activations import activation_bytes, head_bytes, transient_bytes
from megappo.plan.bytes.elements import stage_parameters
from megappo.plan.bytes.memory import RankMemory, engine_memory, rank_memory, role_memory, server_memory, sync_bytes
from megappo.plan.bytes.servers import cache_tokens, running_sequences, server_weights, server_workspace, token_bytes
from megappo.plan.inputs import RoleSetup, Setup
from tests.support.plan import FFN as F
from tests.support.plan import HEAD_DIM as D
from tests.support.plan import HEADS, KV_HEADS, LAYERS, PROMPT, RESPONSE, VOCAB, arch, role, servers, with_experts, work
from tests.support.plan import HIDDEN as H

Q, K = HEADS * D, KV_HEADS * D
CONTEXT_BYTES = 3e9
"""Memory of CUDA and NCCL in a process."""


def layer(tp: int, experts: int = 0) -> int:
    """Return the weights of a layer on one rank without experts. Matrices are split. Norms and the router are
    replicated."""
    matrices = H * (Q + 2 * K) + Q * H + (0 if experts else 3 * H * F)
    return matrices // tp + 2 * H + 2 * D + experts * H


def whole(model: ArchitectureConfig) -> int:
    """Return all weights of the model."""
    vocabulary = (1 if model.tied_embeddings else 2) * VOCAB * H
    return LAYERS * (layer(1, model.experts) + model.experts * 3 * H * F) + H + vocabulary


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("pp", "layers"), [(1, [6]), (2, [3, 3]), (3, [2, 2, 2]), (3, [3, 2, 1]), (6, [1] * 6)])
def test_weights_of_a_stage(tied: bool, pp: int, layers: list[int]) -> None:
    """The embedding is on the first stage. The final norm and the output are on the last stage. A tied embedding has a
    copy on the last stage. The output of a critic is a value head."""
    vocabulary = 102 // 3 * H
    for critic, output in ((False, 0 if tied and pp == 1 else vocabulary), (True, H + 1)):
        expected = [n * layer(3) for n in layers]
        expected[0] += vocabulary
        expected[pp - 1] += H + output
        assert stage_parameters(arch(tied_embeddings=tied), 3, tuple(layers), 102, critic) == tuple(expected)


@pytest.mark.parametrize(
    ("budget", "vpp", "microbatches"), [(77, 1, 4), (60, 1, 4), (59, 1, 7), (29, 1, 7), (90, 2, 4)]
)
def test_microbatches_of_a_minibatch(budget: int, vpp: int, microbatches: int) -> None:
    """A minibatch has seven sequences of 30 tokens. A microbatch has whole sequences up to the budget, at least one.
    With chunks, the number of microbatches is a multiple of the two stages."""
    setup = role(microbatch_budget_tokens=budget, vpp=vpp)
    assert (setup.replica_sequences, setup.microbatches(30)) == (7, microbatches)


@pytest.mark.parametrize(("e", "state"), [(2, 12), (4, 8)])
@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("distributed", [True, False])
def test_memory_of_a_role(e: int, state: int, cuda: bool, distributed: bool) -> None:
    """A parameter has a weight, a gradient, two moments, and a float32 weight if its dtype is bfloat16. AdamW computes
    roots of the second moments unless the optimizer is fused."""
    setup = role(with_experts(), ep=6, dtype_bytes=e, distributed_optimizer=distributed)
    shared, experts = 3 * layer(3, 12) + 34 * H + H, 3 * 2 * 3 * H * F
    rank_parameters = shared / 4 + experts / 2 if distributed else shared + experts
    memory, where = role_memory(setup, 1, work(on_cuda=cuda)), work(on_cuda=cuda)
    assert (memory.role, memory.stage, memory.parameters) == ("actor", 1, shared + experts)
    assert (memory.weights, memory.gradients) == (e * memory.parameters, 4 * memory.parameters)
    assert memory.optimizer == state * rank_parameters
    # Two experts are in one tensor.
    assert memory.optimizer_step == 4 * (rank_parameters if cuda else 2 * 2 * F * H if e == 4 else 0)
    running = [
        activation_bytes(setup, 1, where),
        *(part(setup, 1, where, train=True) for part in (head_bytes, transient_bytes)),
    ]
    assert [memory.activations, memory.head, memory.transient] == running
    assert memory.resident == memory.weights + memory.gradients + memory.optimizer
    assert memory.update == max(sum(running), memory.optimizer_step)
    scorer = role(with_experts(), ep=6, dtype_bytes=e, minibatch_sequences=104)
    passing = [part(scorer, 1, where, train=False) for part in (head_bytes, transient_bytes)]
    assert memory.forward == sum(passing)
    frozen = role_memory(role(with_experts(), ep=6, dtype_bytes=e, trained=False), 1, where)
    nothing: dict[str, Any] = dict.fromkeys(
        ("gradients", "optimizer", "activations", "head", "transient", "optimizer_step"), 0
    )
    assert frozen == dataclasses.replace(memory, **nothing)


def test_replayed_routing_counts_for_all_microbatches() -> None:
    """The routing covers the seven samples of a minibatch on a replica, and the 26 samples of the forward pass, in
    three layers."""
    plain, replayed = (role_memory(role(with_experts(), routing_bytes=n), 0, work()) for n in (0, 5))
    tokens = PROMPT + RESPONSE
    assert replayed.activations - plain.activations == pytest.approx(5 * 3 * 7 * tokens)
    assert replayed.forward - plain.forward == pytest.approx(5 * 3 * 26 * tokens)


def test_load_balancing_loss_keeps_expert_shares() -> None:
    plain, balanced = (role_memory(role(with_experts(), balances_experts=n), 0, work()) for n in (False, True))
    assert balanced.activations - plain.activations == pytest.approx(77 * 2 * 3 * 8 * 12 / 3)


@pytest.mark.parametrize(("cuda", "tokens"), [(True, 8192), (False, 8192 + 1000)])
def test_servers_record_the_experts_of_tokens(cuda: bool, tokens: int) -> None:
    """A server records the experts of the tokens that it computes. On a CPU, the memory is host memory, and a server
    also records the experts of cached tokens."""
    plain, noting = (
        server_memory(
            with_experts(), servers(max_total_tokens=1000, static_bytes=0.0, notes_experts=n), work(on_cuda=cuda)
        )
        for n in (False, True)
    )
    assert noting.total - plain.total == pytest.approx(tokens * 4 * LAYERS * 3)


def test_optimizer_step_can_be_the_peak() -> None:
    short = role(microbatch_budget_tokens=1, minibatch_sequences=1)
    memory = role_memory(short, 0, work(prompt_tokens=1, response_tokens=0))
    assert memory.update == memory.optimizer_step > memory.activations + memory.head + memory.transient


@pytest.mark.parametrize("e", [2, 4])
def test_memory_of_the_embedded_engine(e: int) -> None:
    """The engine has keys and values of five sequences of 30 tokens. One layer has them twice. If queries share keys,
    one layer also has them for each query head. The workspace also has the widest layer of the prompts, or the logits
    in their dtype and three times in float32."""
    for model, repeated in ((arch(), Q), (arch(kv_heads=HEADS), 0)):
        width = model.kv_heads * D
        memory = engine_memory(model, work(engine_dtype_bytes=e))
        assert memory.kv_cache == 2 * LAYERS * width * e * 5 * 30
        copies, widest = 2 * e * 5 * 30 * (width + repeated), e * 5 * PROMPT * (3 * F + 2 * H)
        assert memory.workspace == copies + widest
        sampler = arch(kv_heads=model.kv_heads, vocab_size=10**5)
        assert engine_memory(sampler, work(engine_dtype_bytes=e)).workspace == copies + 5 * 10**5 * (e + 3 * 4)
    memory = engine_memory(arch(), work(engine_dtype_bytes=e))
    assert memory.weights == memory.idle == memory.syncing == e * whole(arch())
    assert memory.total == memory.weights + memory.kv_cache + memory.workspace


@pytest.mark.parametrize(("tp", "groups"), [(1, 1), (2, 1), (6, 1), (6, 3), (6, 6)])
def test_weights_on_a_server_rank(tp: int, groups: int) -> None:
    """Each rank has whole norms. If there are fewer key and value heads than ranks of an attention group, a head is on
    several ranks. Only the ranks of an attention group share the heads and the embedding."""
    model = arch()
    norms, ranks = LAYERS * (2 * H + 2 * D) + H, tp // groups
    keys_and_values, others = LAYERS * 2 * H * K, model.vocab_size * H + LAYERS * 2 * H * Q
    on_rank = (whole(model) - norms - keys_and_values - others) / tp + norms + others / ranks
    on_rank += keys_and_values / min(ranks, 3)
    assert server_weights(model, tp, groups) == pytest.approx(on_rank, rel=1e-12)
    plain = arch(qk_norm=False)
    assert server_weights(plain, 1) == pytest.approx(whole(model) - LAYERS * 2 * D, rel=1e-12)
    of_token = 2 * 2 * LAYERS * max(3 / ranks, 1) * D
    assert token_bytes(model, ranks, 2) == of_token
    server = servers(tensor_parallel=tp, attention_groups=groups)
    tokens = (2e6 - 2 * on_rank) / of_token
    assert cache_tokens(model, server, 2) == pytest.approx(tokens, rel=1e-12)
    assert cache_tokens(model, servers(tensor_parallel=tp, max_total_tokens=33), 2) == 33
    assert cache_tokens(model, servers(static_bytes=0.0, max_total_tokens=33), 2) == 33
    assert cache_tokens(model, servers(static_bytes=1.0), 2) == 0


def test_running_sequences_of_a_server() -> None:
    """A server runs the requested sequences, up to the maximum and the available room, at least one."""
    room = servers(static_bytes=0.0, max_total_tokens=100, most_sequences=8)
    for requested, mean, running in ((5, 10.0, 5), (9, 10.0, 8), (9, 40.0, 2.5), (9, 400.0, 1)):
        assert running_sequences(arch(), room, 2, requested=requested, mean_tokens=mean) == running


def test_workspace_of_a_server() -> None:
    """The workspace is a prefill of 8,192 tokens, or two copies of the float32 logits of all running sequences."""
    assert server_workspace(arch(), servers(), 2, 3.0) == 2 * 8192 * (3 * F / 2 + 4 * H)
    assert server_workspace(arch(vocab_size=10**7), servers(), 2, 3.0) == 2 * 4 * 3 * 10**7


@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize(
    ("colocated", "cuda", "context"), [(True, True, CONTEXT_BYTES), (True, False, 0), (False, True, 0)]
)
def test_memory_of_a_server(sleeps: bool, colocated: bool, cuda: bool, context: float) -> None:
    """The busiest of five servers has 21 of 104 or 105 samples. A cache of 41 tokens has room for two samples at half
    of their length."""
    model = arch(vocab_size=10**7)
    server = servers(sleeps=sleeps, colocated=colocated, static_bytes=0.0, max_total_tokens=10**5)
    memory = server_memory(model, server, work(on_cuda=cuda))
    assert server_memory(model, server, work(on_cuda=cuda, batch_sequences=105)) == memory
    assert memory.weights == 2 * server_weights(model, 2)
    assert memory.kv_cache == 10**5 * 2 * 2 * LAYERS * 1.5 * D
    assert memory.workspace == 2 * 4 * 21 * 10**7 + context
    awake = memory.weights + memory.kv_cache + context
    assert memory.syncing == (memory.weights + context if sleeps else awake)
    assert memory.idle == (context if sleeps else awake)
    few = servers(static_bytes=0.0, max_total_tokens=41)
    assert server_memory(model, few, work()).workspace == 2 * 4 * (41 / (PROMPT + RESPONSE / 2)) * 10**7 + CONTEXT_BYTES


def three_roles(**changes: object) -> Setup:
    """Return an actor and a reference on ranks 5 to 28, and a critic on ranks 0 to 5."""
    critic = role(name="critic", first_rank=0, tp=1, dp=3)
    return Setup(role(), critic, role(name="reference", trained=False), work(**changes))


def by_rank(memories: tuple[RankMemory, ...]) -> dict[int, RankMemory]:
    return {rank: memory for memory in memories if not memory.of_servers for rank in memory.ranks}


def test_stages_of_each_rank() -> None:
    setup = three_roles(reward_bytes=7.0)
    memories = by_rank(rank_memory(setup))
    assert sorted(memories) == list(range(29))
    names = {rank: [(r.role, r.stage) for r in memories[rank].roles] for rank in (0, 1, 5, 8)}
    both = [("actor", 0), ("reference", 0)]
    assert names == {
        0: [("critic", 0)], 1: [("critic", 1)], 5: [*both, ("critic", 1)], 8: [("actor", 1), ("reference", 1)],
    }  # fmt: skip
    engine, memory = engine_memory(setup.actor.arch, setup.work), memories[5]
    actor, reference, critic = memory.roles
    stays = 7 + actor.resident + reference.resident + critic.resident
    idle = stays + engine.idle
    assert memory.stages == pytest.approx({
        "rollout": stays + engine.total,
        "forward": idle + max(actor.forward, reference.forward, critic.forward),
        "update_critic": idle + critic.update,
        "update_actor": idle + actor.update,
        "sync": stays + engine.syncing + sync_bytes(setup),
    }, rel=1e-12)  # fmt: skip
    assert list(memory.stages) == ["rollout", "forward", "update_critic", "update_actor", "sync"]
    assert memory.peak == memory.stages[memory.peak_stage] == max(memory.stages.values())
    without = rank_memory(Setup(role(first_rank=0), None, None, work()))
    roleless = next(memory for memory in without if not memory.roles)
    assert roleless.ranks == tuple(range(24, 29))
    assert roleless.stages == {"rollout": engine.total, "forward": engine.idle, "sync": engine.syncing + roleless.sync}


def bucket(setup: RoleSetup, limit: int) -> float:
    """Return the bytes of a bucket, from the largest tensor up to the model. The largest tensor is gate and up, also of
    an expert."""
    return 2.0 * max(min(limit / 2, whole(setup.arch)), 2 * F * H)


@pytest.mark.parametrize("limit", [1000, 4 * F * H + 2, 10**9])
def test_sync_buckets(limit: int) -> None:
    """The sync needs a bucket and a message of the same size. Servers need one more bucket and the experts of a layer
    for comparison. Slices for servers of two ranks need buckets of half the size, a sixth more for messages of six
    ranks, and half of the experts of one layer per stage."""
    for setup, experts in ((role(), 0), (role(with_experts()), 2 * 12 * 3 * H * F)):
        size = bucket(setup, limit)
        embedded = Setup(setup, None, None, work(sync_bucket_bytes=limit))
        assert sync_bytes(embedded) == 2 * size
        served = Setup(setup, None, None, work(sync_bucket_bytes=limit, servers=servers()))
        assert sync_bytes(served) == pytest.approx(3 * size + experts, rel=1e-12)
        sliced = Setup(setup, None, None, work(sync_bucket_bytes=limit, servers=servers(sliced=True)))
        size = max(min(limit, whole(setup.arch)), 2 * F * H)
        assert sync_bytes(sliced) == pytest.approx((3 + 1 / 6) * size + experts, rel=1e-12)
        in_one_place = work(sync_bucket_bytes=limit, servers=servers(sliced=True, shares_machine=True), on_cuda=False)
        assert sync_bytes(Setup(setup, None, None, in_one_place)) == sync_bytes(served)
    alone = Setup(role(tp=1, pp=1), None, None, work(sync_bucket_bytes=limit))
    assert sync_bytes(alone) == 2 * bucket(role(), limit)


def test_servers_on_shared_or_separate_devices() -> None:
    """Servers are on the devices of trainers, on separate devices with a bucket, or on a machine that all ranks share.
    On a shared machine, each of 29 ranks has the share of ten server ranks."""
    apart = rank_memory(three_roles(servers=servers(colocated=False)))
    own = apart[-1]
    alone = server_memory(arch(), servers(colocated=False), work())
    assert (own.ranks, own.roles, own.of_servers, own.reward) == (tuple(range(10)), (), True, 0)
    assert own.engine == alone and own.sync == bucket(role(), 1000)
    assert own.stages == {"rollout": alone.total, "sync": alone.syncing + own.sync}
    assert all(memory.engine.total == memory.engine.idle == memory.engine.syncing == 0 for memory in apart[:-1])
    on_trainers = rank_memory(three_roles(servers=servers()))
    assert {memory.engine for memory in on_trainers} == {server_memory(arch(), servers(), work())}
    limited = servers(shares_machine=True, colocated=False, static_bytes=0.0, max_total_tokens=99, sleeps=False)
    shared = rank_memory(three_roles(servers=limited, on_cuda=False))
    whole_server = server_memory(arch(), limited, work(on_cuda=False))
    for memory in shared:
        assert memory.engine.total == pytest.approx(whole_server.total * 10 / 29)
        assert memory.engine.idle == memory.engine.syncing == pytest.approx(whole_server.syncing * 10 / 29)


@pytest.mark.parametrize("sleeps", [True, False])
def test_stages_of_offloaded_roles(sleeps: bool) -> None:
    """Each stage includes the state that its role loads. The other roles keep the state that they do not offload."""
    critic = role(name="critic", first_rank=5, offload=OffloadSettings(optimizer=True))
    reference = role(name="reference", trained=False, offload=OffloadSettings(weights=True))
    actor = role(offload=OffloadSettings(weights=True, gradients=True, optimizer=True))
    setup = Setup(actor, critic, reference, work(engine_sleeps=sleeps))
    memory = by_rank(rank_memory(setup))[5]
    a, r, c = memory.roles
    engine = memory.engine
    assert engine.idle == (0 if sleeps else engine.weights) and engine.syncing == engine.weights
    at_rest = c.weights + c.gradients
    assert (a.at_rest, r.at_rest, c.at_rest) == (0, 0, at_rest)
    assert (a.host, r.host, c.host) == (a.weights + a.optimizer, r.weights, c.optimizer)
    scoring = max(a.forward + a.weights, r.forward + r.weights, c.forward)
    assert memory.stages == pytest.approx({
        "rollout": at_rest + engine.total,
        "forward": at_rest + engine.idle + scoring,
        "update_critic": c.resident + engine.idle + c.update,
        "update_actor": at_rest + engine.idle + a.resident + a.update,
        "sync": at_rest + engine.syncing + sync_bytes(setup),
    }, rel=1e-12)  # fmt: skip


@pytest.mark.parametrize(("e", "state", "brought"), [(2, 12, 4), (4, 8, 0)])
@pytest.mark.parametrize("cuda", [True, False])
def test_optimizer_partly_on_the_host(e: int, state: int, brought: int, cuda: bool) -> None:
    """The host has moments, main weights and gradients in float32. Without CUDA, the host memory is the device memory.
    Main weights of a bfloat16 model are loaded temporarily."""
    parameters = role(dtype_bytes=e).parameters(0)
    memory = role_memory(role(dtype_bytes=e, on_host=0.75), 0, work(on_cuda=cuda))
    assert memory.optimizer == pytest.approx(state * 0.25 * parameters + (0 if cuda else 16 * 0.75 * parameters))
    assert memory.host == pytest.approx(16 * 0.75 * parameters if cuda else 0)
    roots = 0.25 * parameters if cuda else role(dtype_bytes=e).largest_weight(0) if e == 4 else 0
    assert memory.optimizer_step == pytest.approx(max(4 * roots, brought * 0.75 * parameters))
