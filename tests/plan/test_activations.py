"""An independent count of activation bytes, with one entry per tensor of a layer."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from megappo.families import gemma2, gemma3_text
from megappo.families.architecture import ArchitectureExtensions
from megappo.families.blocks import QueryKeyNorms
from megappo.families.declaration import ArchitectureConfig
from megappo.plan.bytes.activations import (
    activation_bytes,
    head_bytes,
    layer_bytes_per_token,
    layers_in_flight,
    products_bytes,
    shares_bytes,
    transient_bytes,
)
from tests.support import plan as odd
from tests.support.plan import FFN as F
from tests.support.plan import HEAD_DIM as D
from tests.support.plan import HEADS, KV_HEADS, PROMPT, arch, role, with_experts, work
from tests.support.plan import HIDDEN as H

TP = 4
"""TP divides no size, so shares are fractions."""
Q, K = HEADS * D, KV_HEADS * D
FLOAT = 4


def norm(e: int, fused: bool) -> list[int]:
    """Return the bytes of each tensor that a norm over the hidden size keeps per token. A fused norm keeps its input
    and a scale. The bfloat16 norm of this project on a CPU keeps the same. The float32 operations of torch keep a copy
    of the input, a scale, and the normalised input."""
    return [H * e, FLOAT] if fused or e == 2 else [H * FLOAT, FLOAT, H * FLOAT]


def attention(e: int, fused: bool, qk_norm: bool, kernel: bool) -> list[int]:
    """Return the bytes of each tensor of attention. Query, key and value heads have width D."""
    queries, keys = [D * e] * HEADS, [D * e] * KV_HEADS
    tensors = [*queries, *keys, *keys]  # output of the QKV matrix
    tensors += [*queries, *keys]  # after rotary embedding
    tensors += queries  # input of the output matrix
    if qk_norm:
        tensors += [FLOAT] * (HEADS + KV_HEADS)  # one scale per head
        if fused or e == 2:
            tensors += queries  # contiguous copy
        else:
            tensors += [D * FLOAT] * (HEADS + HEADS + KV_HEADS)  # copies of queries, normalised queries and keys
    if kernel:
        tensors += [*queries, *keys, *keys, *queries] + [FLOAT] * HEADS  # query, key, value, output; log-sum-exp
    return tensors


def mlp(model: ArchitectureConfig, e: int, fused: bool) -> list[int]:
    """Return the bytes of each tensor of the MLP: gate and up in one tensor, and their product. Experts also keep their
    input, and the product is weighted. The operations of torch also keep silu(gate), and the product without weights of
    experts."""
    wide = [2 * F * e, F * e, *([] if fused else [F * e])]
    if not model.experts:
        return wide
    wide += [] if fused else [F * e]
    router = [FLOAT] * model.experts + [FLOAT, 8] * model.experts_per_token
    places = [FLOAT, 8, 8, 8, 8, 8]  # weight and its cell, and source and target of the row twice
    return router + [*places, H * e, *wide] * model.experts_per_token


@pytest.mark.parametrize(
    ("model", "e", "qk_norm", "sequence_parallel", "fused"),
    itertools.product((arch, with_experts), (2, 4), (True, False), (True, False), (True, False)),
)
def test_bytes_of_a_layer_per_token(model: Any, e: int, qk_norm: bool, sequence_parallel: bool, fused: bool) -> None:
    model = model(qk_norm=qk_norm)
    setup = role(model, tp=TP, dtype_bytes=e, sequence_parallel=sequence_parallel)
    share = TP if sequence_parallel else 1
    norms = 2 * sum([*norm(e, fused), H * e])  # with their outputs
    for recompute, kernel in (("none", True), ("selective", False)):
        divided = sum(attention(e, fused, qk_norm, kernel) + mlp(model, e, fused))
        actual = layer_bytes_per_token(setup, recompute=recompute, fused=fused)
        assert actual == pytest.approx(norms / share + divided / TP, rel=1e-12)
    parts = dataclasses.replace(setup, recompute_modules=("moe",) if model.experts else ("mlp",))
    actual = layer_bytes_per_token(parts, recompute="selective", fused=fused)
    assert actual == pytest.approx(norms / share + sum(attention(e, fused, qk_norm, True)) / TP, rel=1e-12)
    actual = layer_bytes_per_token(setup, recompute="full", fused=fused)
    assert actual == pytest.approx(H * e / share, rel=1e-12)


@pytest.mark.parametrize(("e", "fused"), itertools.product((2, 4), (True, False)))
def test_bytes_of_layers_with_output_norms(e: int, fused: bool) -> None:
    """The layer has four norms in float32. Two of them are before the residual additions. The gelu of the gate is a
    tensor on every device."""
    model = dataclasses.replace(arch(), declaration=gemma2.FAMILY, extensions=ArchitectureExtensions(norms_after=True))
    norms = 4 * sum(norm(FLOAT, fused)) + 2 * H * e
    divided = sum(attention(e, fused, qk_norm=False, kernel=True)) + (2 * F + F + F) * e
    actual = layer_bytes_per_token(role(model, tp=TP, dtype_bytes=e), recompute="none", fused=fused)
    assert actual == pytest.approx(norms + divided / TP, rel=1e-12)


def test_zero_centred_key_norms_copy_in_float32() -> None:
    """Check the norms of Gemma 3 on a CPU. In bfloat16 the keys are copied. In float32 the keys are views of the output
    of the matrix."""
    model = dataclasses.replace(arch(), declaration=gemma3_text.FAMILY)
    scales, copies = FLOAT * (HEADS + KV_HEADS), FLOAT * (2 * Q + K)
    actual = {e: QueryKeyNorms().per_token(model, e, fused=False).activation_bytes for e in (2, 4)}
    assert actual == {2: scales + copies + FLOAT * K, 4: scales + copies}


def capped() -> ArchitectureConfig:
    return dataclasses.replace(arch(), declaration=gemma2.FAMILY, extensions=ArchitectureExtensions(scores_cap=5.0))


def test_products_of_capped_scores() -> None:
    """A block has 30 queries, the length of a sequence. The 77 tokens are padded to 154."""
    model = capped()
    setup, plain = role(model, tp=TP), role(dataclasses.replace(model, extensions=ArchitectureExtensions()), tp=TP)
    scores, vectors = 4 * 30 * 154 * HEADS * FLOAT, 154 * (Q + 2 * K) * FLOAT
    assert products_bytes(setup, work()) == pytest.approx((scores + vectors) / TP, rel=1e-12)
    assert products_bytes(plain, work()) == 0
    actual, usual = (transient_bytes(x, 0, work(), train=False) for x in (setup, plain))
    assert actual >= products_bytes(setup, work()) and actual > usual


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("e", [2, 4])
def test_elements_moved_by_a_layer_per_token(e: int, fused: bool) -> None:
    """Norms are negligible. Each routed row is read and written for each of two reorderings."""
    dense, sparse = (model.declaration.per_token(model, e, fused=fused) for model in (arch(), with_experts()))
    assert dense.live_elements == dense.moved_elements == (3 if fused else 4) * F
    rows = with_experts().experts_per_token
    assert sparse.moved_elements == rows * ((3 if fused else 5) * F + 4 * H)
    widened = 0 if fused or e == 4 else 2 * F  # the weighted product in float32, if rows are in bfloat16
    assert sparse.live_elements == sparse.moved_elements + rows * widened


@pytest.mark.parametrize(
    ("pp", "vpp", "stage", "microbatches", "layers"),
    [
        (2, 1, 0, 4, 6),  # two microbatches of three layers
        (2, 1, 1, 4, 3),
        (3, 1, 0, 2, 4),  # limited by the number of microbatches
        (2, 3, 0, 4, 7),  # 2 x 1 + 2 x 2 + 1 chunks of one layer
        (2, 3, 1, 4, 5),
        (3, 2, 0, 6, 8),  # 2 x 2 + 3 + 1
        (3, 2, 2, 6, 4),
        (2, 3, 0, 2, 6),  # limited by the number of microbatches
    ],
)
def test_layers_in_flight_by_hand(pp: int, vpp: int, stage: int, microbatches: int, layers: int) -> None:
    assert layers_in_flight(role(pp=pp, vpp=vpp), stage, microbatches) == layers


@pytest.mark.parametrize(("tokens", "seen"), [(30, 30), (256, 256), (300, 256), (1000, 256)])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_attention_bytes_of_short_samples(tokens: int, seen: int, qk_norm: bool) -> None:
    """Check attention on a CPU in bfloat16. Attention keeps copies of queries, keys and values, and a share of each key
    that a query attends to. These tensors replace the outputs of the rotation and the kernel, and the matrix if no norm
    keeps its output. From 256 tokens on, the bytes equal those of 256 tokens."""
    short = work(on_cuda=False, prompt_tokens=PROMPT, response_tokens=tokens - PROMPT)
    model = arch(qk_norm=qk_norm)
    # Without the input of the output matrix.
    replaced = sum(attention(2, fused=False, qk_norm=False, kernel=True)) - Q * 2
    if qk_norm:
        replaced -= (Q + 2 * K) * 2
    products = (Q + 2 * K) * 2 + HEADS * seen * 2
    shares = shares_bytes(role(model, tp=TP), short)
    expected = (products - replaced) / TP
    assert shares == pytest.approx(expected, rel=1e-12)
    for other in (role(model, tp=TP, dtype_bytes=4), role(model, tp=TP, cp=2), role(capped())):
        assert shares_bytes(other, short) == 0
    assert shares_bytes(role(model, tp=TP), dataclasses.replace(short, on_cuda=True)) == 0
    # The first stage has two microbatches of three layers.
    total_shares = 77 * (2 * 3 * shares) if tokens == 30 else None
    setups = [role(model, tp=TP, recompute="selective", recompute_modules=parts) for parts in ((), ("core_attn",))]
    if total_shares is not None:
        kernel = sum(attention(2, False, False, True)) - sum(attention(2, False, False, False))
        with_shares, without = (activation_bytes(setup, 0, short) for setup in setups)
        assert with_shares - without == pytest.approx(total_shares + 77 * 6 * kernel / TP, rel=1e-9)


@pytest.mark.parametrize(
    ("recompute", "cuda", "sharing"), [("none", True, TP), ("selective", False, 1), ("full", True, 1)]
)
def test_bytes_of_a_stage(recompute: str, cuda: bool, sharing: int) -> None:
    """The first stage keeps 77 tokens of two microbatches. The last stage keeps one microbatch and the final norm. Each
    microbatch also has the cosine and sine of its positions."""
    setup = role(tp=TP, recompute=recompute, sequence_parallel=sharing > 1)
    of = {name: layer_bytes_per_token(setup, recompute=name, fused=cuda) for name in (recompute, "none")}
    whole = of["none"] if recompute == "full" else 0.0  # one layer during its backward pass
    rotary = sum([D * 4] * 2)  # in float32
    assert activation_bytes(setup, 0, work(on_cuda=cuda)) == pytest.approx(
        77 * (2 * (3 * of[recompute] + rotary) + whole), rel=1e-12
    )
    last = 77 * (3 * of[recompute] + rotary + whole + sum(norm(2, cuda)) / sharing)
    assert activation_bytes(setup, 1, work(on_cuda=cuda)) == pytest.approx(last, rel=1e-12)


def test_recomputed_mlp_is_whole_for_one_layer() -> None:
    setup = role(recompute="selective", recompute_modules=("mlp",))
    dropped, whole = (layer_bytes_per_token(setup, recompute=name, fused=True) for name in ("selective", "none"))
    expected = 77 * (2 * (3 * dropped + 8 * D) + whole - dropped)
    assert activation_bytes(setup, 0, work()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("recompute", "recomputed"), [("none", False), ("selective", True)])
def test_context_parallel_ranks_keep_gathered_keys(recompute: str, recomputed: bool) -> None:
    """Three ranks share 77 tokens, at most 26 per rank. Attention has keys and values of all three ranks. The keys and
    values of the first chunk of each rank are also kept for the second chunk. With recomputation, only one layer has
    them."""
    setup = role(cp=3, recompute=recompute)
    assert setup.rank_tokens(30) == 26
    alone = layer_bytes_per_token(role(recompute="none"), recompute="none", fused=True)
    whole = alone + 2.5 * 2 * K * 2 / 3
    selective = layer_bytes_per_token(role(recompute="selective"), recompute="selective", fused=True)
    expected = 2 * (3 * (selective if recomputed else whole) + 8 * D) + (whole - selective if recomputed else 0)
    assert activation_bytes(setup, 0, work()) == pytest.approx(26 * expected, rel=1e-12)
    exchanged = 26 * (1 + 3) * 2 * K * 2 / 3  # sent by this rank, and received from all ranks
    passing = 26 * (sum(mlp(arch(), 2, fused=True)) / 3 + 2 * H * 2)
    assert transient_bytes(setup, 0, work(), train=False) == pytest.approx(passing + exchanged, rel=1e-12)
    assert head_bytes(setup, 1, work(), train=False) == 26 * H * 2 + 26 * 34 * FLOAT


def test_bytes_of_a_small_minibatch() -> None:
    """Two sequences of 30 tokens are below the budget of 77."""
    setup = role(minibatch_sequences=5)
    assert setup.microbatch_tokens(30) == 60 and role().microbatch_tokens(30) == 77
    assert role(cp=2, minibatch_sequences=5).microbatch_tokens(30) == 64  # padded to a multiple of four
    per_token = layer_bytes_per_token(setup, recompute="none", fused=True)
    assert activation_bytes(setup, 0, work()) == pytest.approx(60 * (3 * per_token + 8 * D), rel=1e-12)


@pytest.mark.parametrize("e", [2, 4])
@pytest.mark.parametrize("cuda", [True, False])
def test_bytes_of_the_output_layer(e: int, cuda: bool) -> None:
    """Each of three ranks has 34 of 102 rows of the vocabulary."""
    setup, critic = role(dtype_bytes=e), role(dtype_bytes=e, name="critic")
    for train in (True, False):
        assert head_bytes(setup, 0, work(on_cuda=cuda), train=train) == 0
        rows = [77 * H * e, 77 * H * FLOAT]
        assert head_bytes(critic, 1, work(on_cuda=cuda), train=train) == sum(rows) * (2 if train else 1)
    selected, gradients = [77 * H * e] * 2, [77 * H * FLOAT, 77 * H * e]
    logits = 77 * 34 * (FLOAT + (2 if e == 2 else 0))
    training = sum([*selected, *gradients, logits, 34 * H * e])
    assert head_bytes(setup, 1, work(on_cuda=cuda), train=True) == training
    assert head_bytes(setup, 1, work(on_cuda=cuda), train=False) == 77 * H * e + 77 * 34 * FLOAT


@pytest.mark.parametrize(("cuda", "chunk", "rows", "columns"), [(True, 2**31, 8192, 8192), (False, 2**28, 512, 896)])
def test_large_output_layer_is_split_into_chunks(cuda: bool, chunk: int, rows: int, columns: int) -> None:
    setup = role(
        arch(vocab_size=300_000), padded_vocab=300_000, minibatch_sequences=10**4, microbatch_budget_tokens=9999
    )
    training = 9999 * H * (2 * 2 + FLOAT + 2) + chunk + 100_000 * H * 2
    assert head_bytes(setup, 1, work(on_cuda=cuda), train=True) == training
    assert head_bytes(setup, 1, work(on_cuda=cuda), train=False) == 9999 * H * 2 + rows * columns * FLOAT


@pytest.mark.parametrize("e", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("cuda", [True, False])
def test_transient_bytes_of_a_layer(e: int, sequence_parallel: bool, cuda: bool) -> None:
    """A layer needs the tensors of SwiGLU between two residual streams. Experts also need the sent, received and sorted
    rows. The operations of torch need products with and without weights, one of them in float32."""
    dense = mlp(arch(), e, fused=cuda)
    apart = [] if cuda else [F * e, *([F * FLOAT] if e == 2 else [])]
    routed = odd.PER_TOKEN * sum([*dense, *apart, *[H * e] * 4])
    of_experts = odd.EXPERTS * 2 * F
    for model, inner, widest in ((arch(), sum(dense), 2 * F // 3), (with_experts(), routed, of_experts)):
        settings: dict[str, Any] = {"dtype_bytes": e, "sequence_parallel": sequence_parallel}
        setup = role(model, **settings)
        passing = 77 * (inner / 3 + 2 * H * e) + (77 * H * e if sequence_parallel else 0)
        assert transient_bytes(setup, 0, work(on_cuda=cuda), train=False) == pytest.approx(passing, rel=1e-12)
        assert transient_bytes(setup, 0, work(on_cuda=cuda), train=True) == pytest.approx(
            passing + widest * H * e, rel=1e-12
        )
        shared = transient_bytes(role(model, tp=TP, **settings), 0, work(on_cuda=cuda), train=False)
        assert passing - shared == pytest.approx(77 * (inner / 3 - inner / TP), rel=1e-9)


def test_largest_weight() -> None:
    """The largest weight is the vocabulary on the first stage and on the last stage of an actor. On other stages the
    largest weight is gate and up."""
    small = role(arch(vocab_size=300), pp=3, padded_vocab=300)
    assert [small.largest_weight(stage) for stage in range(3)] == [100 * H, 2 * F // 3 * H, 100 * H]
    critic = role(arch(vocab_size=300), pp=3, padded_vocab=300, name="critic")
    assert [critic.largest_weight(stage) for stage in range(3)] == [100 * H, 2 * F // 3 * H, 2 * F // 3 * H]
    for ep in (1, 6):  # all experts of a rank in one tensor
        experts = role(with_experts(), pp=3, ep=ep)
        assert [experts.largest_weight(stage) for stage in range(3)] == [odd.EXPERTS // ep * 2 * F * H] * 3


@pytest.mark.parametrize(("vpp", "sending"), [(1, (3, 0)), (3, (8, 4))])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_outputs_of_stages_remain_unless_freed(vpp: int, sending: tuple[float, float], sequence_parallel: bool) -> None:
    """Without chunks, the first stage keeps the outputs of two microbatches in flight and of the previous one. The last
    stage sends no output. With three chunks, the first stage keeps eight outputs, and the last one two thirds of six.
    """
    setup = role(vpp=vpp, sequence_parallel=sequence_parallel, frees_outputs=False)
    for stage in (0, 1):
        more = activation_bytes(setup, stage, work()) - activation_bytes(
            dataclasses.replace(setup, frees_outputs=True), stage, work()
        )
        assert more == pytest.approx(sending[stage] * 77 * H * 2 / (3 if sequence_parallel else 1))
