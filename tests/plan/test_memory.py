"""Bytes on every rank, counted by hand on sizes that are odd."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megappo.config.roles import OffloadSettings
from megappo.families.architecture import ArchitectureConfig
from megappo.plan.activations import head_bytes, kept_bytes, transient_bytes
from megappo.plan.elements import stage_parameters
from megappo.plan.inputs import RoleSetup, Setup
from megappo.plan.memory import RankMemory, engine_memory, rank_memory, role_memory, server_memory, sync_bytes
from megappo.plan.servers import cache_tokens, running_sequences, server_weights, server_workspace, token_bytes
from tests.support.plan import FFN as F
from tests.support.plan import HEAD_DIM as D
from tests.support.plan import HEADS, KV_HEADS, LAYERS, PROMPT, RESPONSE, VOCAB, arch, role, servers, with_experts, work
from tests.support.plan import HIDDEN as H

Q, K = HEADS * D, KV_HEADS * D
CONTEXT_BYTES = 3e9
"""Of CUDA and NCCL in a process."""


def layer(tp: int, experts: int = 0) -> int:
    """Weights of a layer on one rank, those of experts left out: matrices are cut, norms and router are not."""
    matrices = H * (Q + 2 * K) + Q * H + (0 if experts else 3 * H * F)
    return matrices // tp + 2 * H + 2 * D + experts * H


def whole(model: ArchitectureConfig) -> int:
    """All weights."""
    vocabulary = (1 if model.tied_embeddings else 2) * VOCAB * H
    return LAYERS * (layer(1, model.experts) + model.experts * 3 * H * F) + H + vocabulary


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("pp", "layers"), [(1, [6]), (2, [3, 3]), (3, [2, 2, 2]), (3, [3, 2, 1]), (6, [1] * 6)])
def test_weights_of_a_stage(tied: bool, pp: int, layers: list[int]) -> None:
    """The embedding is on the first stage, the final norm and the output on the last: an embedding that is the output
    as well has a copy there. A critic's output is a value head."""
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
    """Seven sequences of 30 tokens, as many whole ones in a microbatch as the budget has room for, one at least; with
    chunks a multiple of the two stages."""
    setup = role(microbatch_budget_tokens=budget, vpp=vpp)
    assert (setup.replica_sequences, setup.microbatches(30)) == (7, microbatches)


@pytest.mark.parametrize(("e", "state"), [(2, 12), (4, 8)])
@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("distributed", [True, False])
def test_what_stays_of_a_role(e: int, state: int, cuda: bool, distributed: bool) -> None:
    """Weight, gradient, moments, and for bfloat16 a weight in float32; AdamW takes roots of the second moments, but
    where it is fused."""
    setup = role(with_experts(), ep=6, dtype_bytes=e, distributed_optimizer=distributed)
    shared, experts = 3 * layer(3, 12) + 34 * H + H, 3 * 2 * 3 * H * F
    here = shared / 4 + experts / 2 if distributed else shared + experts
    found, where = role_memory(setup, 1, work(on_cuda=cuda)), work(on_cuda=cuda)
    assert (found.role, found.stage, found.parameters) == ("actor", 1, shared + experts)
    assert (found.weights, found.gradients) == (e * found.parameters, 4 * found.parameters)
    assert found.optimizer == state * here
    assert found.optimizer_step == 4 * (here if cuda else 2 * 2 * F * H if e == 4 else 0)  # of two experts in one
    running = [
        kept_bytes(setup, 1, where),
        *(part(setup, 1, where, train=True) for part in (head_bytes, transient_bytes)),
    ]
    assert [found.activations, found.head, found.transient] == running
    assert found.resident == found.weights + found.gradients + found.optimizer
    assert found.update == max(sum(running), found.optimizer_step)
    scorer = role(with_experts(), ep=6, dtype_bytes=e, minibatch_sequences=104)
    passing = [part(scorer, 1, where, train=False) for part in (head_bytes, transient_bytes)]
    assert found.forward == sum(passing)
    frozen = role_memory(role(with_experts(), ep=6, dtype_bytes=e, trained=False), 1, where)
    nothing: dict[str, Any] = dict.fromkeys(
        ("gradients", "optimizer", "activations", "head", "transient", "optimizer_step"), 0
    )
    assert frozen == dataclasses.replace(found, **nothing)


def test_routing_that_is_replayed_is_there_in_all_microbatches() -> None:
    """Of the seven samples of a minibatch on a replica, and of the 26 of the forward pass, in three layers."""
    plain, replayed = (role_memory(role(with_experts(), routing_bytes=n), 0, work()) for n in (0, 5))
    tokens = PROMPT + RESPONSE
    assert replayed.activations - plain.activations == pytest.approx(5 * 3 * 7 * tokens)
    assert replayed.forward - plain.forward == pytest.approx(5 * 3 * 26 * tokens)


def test_a_load_balancing_loss_keeps_the_shares_of_all_experts() -> None:
    plain, balanced = (role_memory(role(with_experts(), balances_experts=n), 0, work()) for n in (False, True))
    assert balanced.activations - plain.activations == pytest.approx(77 * 2 * 3 * 8 * 12 / 3)


@pytest.mark.parametrize(("cuda", "tokens"), [(True, 8192), (False, 8192 + 1000)])
def test_a_server_notes_the_experts_of_tokens(cuda: bool, tokens: int) -> None:
    """Of those that it computes, and on a CPU, whose memory is the host's, of those whose keys and values it holds."""
    plain, noting = (
        server_memory(
            with_experts(), servers(max_total_tokens=1000, static_bytes=0.0, notes_experts=n), work(on_cuda=cuda)
        )
        for n in (False, True)
    )
    assert noting.total - plain.total == pytest.approx(tokens * 4 * LAYERS * 3)


def test_an_optimizer_step_may_be_the_peak() -> None:
    short = role(microbatch_budget_tokens=1, minibatch_sequences=1)
    found = role_memory(short, 0, work(prompt_tokens=1, response_tokens=0))
    assert found.update == found.optimizer_step > found.activations + found.head + found.transient


@pytest.mark.parametrize("e", [2, 4])
def test_the_embedded_engine(e: int) -> None:
    """Keys and values of five sequences of 30 tokens; one layer's a second time and, where queries share them, for each
    query head; the widest layer over the prompts, or logits in their type and three times in float32."""
    for model, repeated in ((arch(), Q), (arch(kv_heads=HEADS), 0)):
        width = model.kv_heads * D
        found = engine_memory(model, work(engine_dtype_bytes=e))
        assert found.kv_cache == 2 * LAYERS * width * e * 5 * 30
        copies, widest = 2 * e * 5 * 30 * (width + repeated), e * 5 * PROMPT * (3 * F + 2 * H)
        assert found.workspace == copies + widest
        sampler = arch(kv_heads=model.kv_heads, vocab_size=10**5)
        assert engine_memory(sampler, work(engine_dtype_bytes=e)).workspace == copies + 5 * 10**5 * (e + 3 * 4)
    found = engine_memory(arch(), work(engine_dtype_bytes=e))
    assert found.weights == found.idle == found.syncing == e * whole(arch())
    assert found.total == found.weights + found.kv_cache + found.workspace


@pytest.mark.parametrize(("tp", "groups"), [(1, 1), (2, 1), (6, 1), (6, 3), (6, 6)])
def test_a_rank_of_a_server(tp: int, groups: int) -> None:
    """Norms are whole on each rank; a key and value head, if there are fewer than ranks that attend together, is on
    several; heads and embedding are shared out by those alone."""
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
    given = servers(tensor_parallel=tp, attention_groups=groups)
    tokens = (2e6 - 2 * on_rank) / of_token
    assert cache_tokens(model, given, 2) == pytest.approx(tokens, rel=1e-12)
    assert cache_tokens(model, servers(tensor_parallel=tp, max_total_tokens=33), 2) == 33
    assert cache_tokens(model, servers(static_bytes=0.0, max_total_tokens=33), 2) == 33
    assert cache_tokens(model, servers(static_bytes=1.0), 2) == 0


def test_sequences_that_a_server_runs() -> None:
    """As many as are wanted, as may be kept, as have room; one at least."""
    room = servers(static_bytes=0.0, max_total_tokens=100, most_sequences=8)
    for wanted, mean, running in ((5, 10.0, 5), (9, 10.0, 8), (9, 40.0, 2.5), (9, 400.0, 1)):
        assert running_sequences(arch(), room, 2, wanted=wanted, mean_tokens=mean) == running


def test_workspace_of_a_server() -> None:
    """A prefill of 8,192 tokens, or logits of all that run in float32, twice."""
    assert server_workspace(arch(), servers(), 2, 3.0) == 2 * 8192 * (3 * F / 2 + 4 * H)
    assert server_workspace(arch(vocab_size=10**7), servers(), 2, 3.0) == 2 * 4 * 3 * 10**7


@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize(
    ("colocated", "cuda", "context"), [(True, True, CONTEXT_BYTES), (True, False, 0), (False, True, 0)]
)
def test_memory_of_a_server(sleeps: bool, colocated: bool, cuda: bool, context: float) -> None:
    """104 or 105 samples on five servers are 21 on the busiest; 41 tokens are two of them halfway."""
    model = arch(vocab_size=10**7)
    given = servers(sleeps=sleeps, colocated=colocated, static_bytes=0.0, max_total_tokens=10**5)
    found = server_memory(model, given, work(on_cuda=cuda))
    assert server_memory(model, given, work(on_cuda=cuda, batch_sequences=105)) == found
    assert found.weights == 2 * server_weights(model, 2)
    assert found.kv_cache == 10**5 * 2 * 2 * LAYERS * 1.5 * D
    assert found.workspace == 2 * 4 * 21 * 10**7 + context
    awake = found.weights + found.kv_cache + context
    assert found.syncing == (found.weights + context if sleeps else awake)
    assert found.idle == (context if sleeps else awake)
    few = servers(static_bytes=0.0, max_total_tokens=41)
    assert server_memory(model, few, work()).workspace == 2 * 4 * (41 / (PROMPT + RESPONSE / 2)) * 10**7 + CONTEXT_BYTES


def three_roles(**changes: object) -> Setup:
    """Actor and reference on ranks 5 to 28, a critic on ranks 0 to 5."""
    critic = role(name="critic", first_rank=0, tp=1, dp=3)
    return Setup(role(), critic, role(name="reference", trained=False), work(**changes))


def by_rank(found: tuple[RankMemory, ...]) -> dict[int, RankMemory]:
    return {rank: memory for memory in found if not memory.of_servers for rank in memory.ranks}


def test_stages_of_each_rank() -> None:
    setup = three_roles(reward_bytes=7.0)
    found = by_rank(rank_memory(setup))
    assert sorted(found) == list(range(29))
    names = {rank: [(r.role, r.stage) for r in found[rank].roles] for rank in (0, 1, 5, 8)}
    both = [("actor", 0), ("reference", 0)]
    assert names == {
        0: [("critic", 0)],
        1: [("critic", 1)],
        5: [*both, ("critic", 1)],
        8: [("actor", 1), ("reference", 1)],
    }
    engine, memory = engine_memory(setup.actor.arch, setup.work), found[5]
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
    nobody = next(memory for memory in without if not memory.roles)
    assert nobody.ranks == tuple(range(24, 29))
    assert nobody.stages == {"rollout": engine.total, "forward": engine.idle, "sync": engine.syncing + nobody.sync}


def bucket(setup: RoleSetup, given: int) -> float:
    """At most the model, at least its largest tensor: gate and up together, of an expert as well."""
    return 2.0 * max(min(given / 2, whole(setup.arch)), 2 * F * H)


@pytest.mark.parametrize("given", [1000, 4 * F * H + 2, 10**9])
def test_buckets(given: int) -> None:
    """A bucket, and as much in messages; for servers one more, and a layer's experts to be compared. Slices for servers
    of two ranks: half as large, of six ranks' messages a sixth more, and half of the experts of a layer of each
    stage."""
    for setup, experts in ((role(), 0), (role(with_experts()), 2 * 12 * 3 * H * F)):
        size = bucket(setup, given)
        embedded = Setup(setup, None, None, work(sync_bucket_bytes=given))
        assert sync_bytes(embedded) == 2 * size
        served = Setup(setup, None, None, work(sync_bucket_bytes=given, servers=servers()))
        assert sync_bytes(served) == pytest.approx(3 * size + experts, rel=1e-12)
        sliced = Setup(setup, None, None, work(sync_bucket_bytes=given, servers=servers(sliced=True)))
        size = max(min(given, whole(setup.arch)), 2 * F * H)
        assert sync_bytes(sliced) == pytest.approx((3 + 1 / 6) * size + experts, rel=1e-12)
        in_one_place = work(sync_bucket_bytes=given, servers=servers(sliced=True, shares_machine=True), on_cuda=False)
        assert sync_bytes(Setup(setup, None, None, in_one_place)) == sync_bytes(served)
    alone = Setup(role(tp=1, pp=1), None, None, work(sync_bucket_bytes=given))
    assert sync_bytes(alone) == 2 * bucket(role(), given)


def test_servers_on_ranks_of_trainers_or_their_own() -> None:
    """On the trainers' devices; on devices of their own, where they take a bucket; on a machine that all share, where a
    rank counts for ten servers' ranks in 29."""
    apart = rank_memory(three_roles(servers=servers(colocated=False)))
    own = apart[-1]
    alone = server_memory(arch(), servers(colocated=False), work())
    assert (own.ranks, own.roles, own.of_servers, own.reward) == (tuple(range(10)), (), True, 0)
    assert own.engine == alone and own.sync == bucket(role(), 1000)
    assert own.stages == {"rollout": alone.total, "sync": alone.syncing + own.sync}
    assert all(memory.engine.total == memory.engine.idle == memory.engine.syncing == 0 for memory in apart[:-1])
    here = rank_memory(three_roles(servers=servers()))
    assert {memory.engine for memory in here} == {server_memory(arch(), servers(), work())}
    limited = servers(shares_machine=True, colocated=False, static_bytes=0.0, max_total_tokens=99, sleeps=False)
    shared = rank_memory(three_roles(servers=limited, on_cuda=False))
    whole_server = server_memory(arch(), limited, work(on_cuda=False))
    for memory in shared:
        assert memory.engine.total == pytest.approx(whole_server.total * 10 / 29)
        assert memory.engine.idle == memory.engine.syncing == pytest.approx(whole_server.syncing * 10 / 29)


@pytest.mark.parametrize("sleeps", [True, False])
def test_stages_of_roles_that_rest(sleeps: bool) -> None:
    """Each stage has what its role brings back; the others have what they do not give away."""
    critic = role(name="critic", first_rank=5, offload=OffloadSettings(optimizer=True))
    reference = role(name="reference", trained=False, offload=OffloadSettings(weights=True))
    actor = role(offload=OffloadSettings(weights=True, gradients=True, optimizer=True))
    setup = Setup(actor, critic, reference, work(engine_sleeps=sleeps))
    found = by_rank(rank_memory(setup))[5]
    a, r, c = found.roles
    engine = found.engine
    assert engine.idle == (0 if sleeps else engine.weights) and engine.syncing == engine.weights
    at_rest = c.weights + c.gradients
    assert (a.at_rest, r.at_rest, c.at_rest) == (0, 0, at_rest)
    assert (a.host, r.host, c.host) == (a.weights + a.optimizer, r.weights, c.optimizer)
    scoring = max(a.forward + a.weights, r.forward + r.weights, c.forward)
    assert found.stages == pytest.approx({
        "rollout": at_rest + engine.total,
        "forward": at_rest + engine.idle + scoring,
        "update_critic": c.resident + engine.idle + c.update,
        "update_actor": at_rest + engine.idle + a.resident + a.update,
        "sync": at_rest + engine.syncing + sync_bytes(setup),
    }, rel=1e-12)  # fmt: skip


@pytest.mark.parametrize(("e", "state", "brought"), [(2, 12, 4), (4, 8, 0)])
@pytest.mark.parametrize("cuda", [True, False])
def test_an_optimizer_that_is_partly_on_the_host(e: int, state: int, brought: int, cuda: bool) -> None:
    """Moments, main weight and gradient are there in float32; without CUDA the host is where everything is. Main
    weights of bfloat16 come for a moment."""
    here = role(dtype_bytes=e).parameters(0)
    found = role_memory(role(dtype_bytes=e, on_host=0.75), 0, work(on_cuda=cuda))
    assert found.optimizer == pytest.approx(state * 0.25 * here + (0 if cuda else 16 * 0.75 * here))
    assert found.host == pytest.approx(16 * 0.75 * here if cuda else 0)
    roots = 0.25 * here if cuda else role(dtype_bytes=e).largest_weight(0) if e == 4 else 0
    assert found.optimizer_step == pytest.approx(max(4 * roots, brought * 0.75 * here))
