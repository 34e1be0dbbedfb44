"""Which rank has which tokens of a pack that ranks share out, what each token sees, and what is asked of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.config.grid import Grid
from megappo.megatron.attention import packed_segments, segment_tensors
from megappo.megatron.context import ContextShard
from megappo.megatron.layout import Layout
from megappo.megatron.schedule import PackedBatch, PlacedSample, pack_samples
from megappo.ppo.updates import LossWeights

CPU = torch.device("cpu")
SIZES = st.sampled_from([2, 3, 4])
PADDED = st.lists(st.integers(1, 5), min_size=1, max_size=6)
"""Lengths of chunks."""


@st.composite
def samples(draw: st.DrawFn) -> list[PlacedSample]:
    """A prompt of a token or more and a response each, of tokens that tell where they stand."""
    lengths = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 15)), min_size=1, max_size=6))
    return [
        PlacedSample(
            sample_id=i,
            tokens_T=100 * (i + 1) + torch.arange(prompt + response),
            response_tokens=response,
            fields={"mask": torch.ones(response), "place": 100.0 * (i + 1) + prompt + torch.arange(response)},
        )
        for i, (prompt, response) in enumerate(lengths)
    ]


def packs(chosen: list[PlacedSample], cp: int, tp: int, *, sequence_parallel: bool) -> list[PackedBatch]:
    """The same samples as each context rank packs them."""
    grid, nothing = Grid(range(cp * tp), tp, 1, cp=cp), cast(Any, None)
    layouts = [Layout(grid, 1, sequence_parallel, 0, 0, c, 0, 0, 0, nothing, nothing) for c in range(cp)]
    return [pack_samples(chosen, CPU, shard=la.shard, multiple_of=la.token_multiple) for la in layouts]


def test_a_pack_by_hand() -> None:
    """Two ranks, a segment of eight tokens and one of four: the first and last quarters, and those in the middle."""
    first, second = ContextShard(2, 0), ContextShard(2, 1)
    assert first.places([8, 4]).tolist() == [0, 1, 6, 7, 8, 11]
    assert second.places([8, 4]).tolist() == [2, 3, 4, 5, 9, 10]
    segments = packed_segments((8, 4), segment_tensors((8, 4), second), second)
    assert segments.positions.tolist() == [2, 3, 4, 5, 1, 2]
    assert segments.cu_seqlens_q.tolist() == segments.cu_seqlens_kv.tolist() == [0, 8, 12]  # as Megatron wants it
    assert segments.chunks is not None and segments.chunks.key_rows is not None
    assert (segments.chunks.lengths, segments.chunks.key_lengths) == ((2, 2, 1, 1), (4, 6, 2, 3))
    assert segments.chunks.key_rows.tolist() == [0, 1, 6, 7, 0, 1, 6, 7, 8, 9, 4, 10, 4, 10, 11]


@given(SIZES, PADDED)
def test_every_token_has_one_rank_and_all_have_as_much_to_see(size: int, chunks: list[int]) -> None:
    lengths = [2 * size * chunk for chunk in chunks]
    positions = torch.cat([torch.arange(n) for n in lengths])
    shards = [ContextShard(size, rank) for rank in range(size)]
    places = [shard.places(lengths) for shard in shards]
    assert sorted(torch.cat(places).tolist()) == list(range(sum(lengths)))
    assert {len(mine) for mine in places} == {sum(lengths) // size}
    assert len({int((positions[mine] + 1).sum()) for mine in places}) == 1
    assert len({len(shard.key_rows(lengths)) for shard in shards}) == 1


@given(SIZES, PADDED)
def test_chunks_see_the_tokens_before_them(size: int, chunks: list[int]) -> None:
    """Of what the ranks hand over, one after the other, each chunk takes its segment from the start to its own end."""
    lengths = tuple(2 * size * chunk for chunk in chunks)
    handed_over = torch.cat([ContextShard(size, rank).places(lengths) for rank in range(size)])
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    for rank in range(size):
        shard = ContextShard(size, rank)
        described = packed_segments(lengths, segment_tensors(lengths, shard), shard).chunks
        assert described is not None and described.key_rows is not None
        seen = handed_over[described.key_rows].split(described.key_lengths)
        own = ContextShard(size, rank).places(lengths).split(described.lengths)
        for number, (keys, queries) in enumerate(zip(seen, own, strict=True)):
            assert keys.tolist() == list(range(int(starts[number // 2]), int(queries[-1]) + 1))


@given(SIZES, PADDED, st.randoms())
def test_what_ranks_find_comes_together_again(size: int, chunks: list[int], random: Any) -> None:
    lengths = [2 * size * chunk for chunk in chunks]
    wanted = torch.tensor(sorted(random.sample(range(sum(lengths)), random.randint(1, sum(lengths)))))
    whole = torch.zeros(len(wanted), dtype=torch.int64)
    for rank in range(size):
        shard = ContextShard(size, rank)
        rows, own = shard.find(wanted, lengths)
        assert torch.equal(shard.places(lengths)[rows], wanted[own])
        whole.index_add_(0, own, shard.places(lengths)[rows] + 1)
    assert torch.equal(whole, wanted + 1)  # each once


@given(samples(), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3]), st.booleans())
def test_a_response_may_be_cut_anywhere(chosen: list[PlacedSample], cp: int, tp: int, sequence_parallel: bool) -> None:
    """Each response token is predicted once, on the rank of the token before it, with its own numbers there."""
    found = packs(chosen, cp, tp, sequence_parallel=sequence_parallel)
    labels = [label for batch in found for label in batch.labels_N.tolist()]
    assert sorted(labels) == sorted(t for s in chosen for t in s.tokens_T[-s.response_tokens :].tolist())
    assert len({batch.tokens_1l.shape for batch in found}) == 1
    weights = LossWeights("seq-mean-token-mean", tokens=999, sequences=len(chosen), norm_tokens=1)
    for batch in found:
        assert not sequence_parallel or batch.tokens_1l.shape[1] % tp == 0
        assert torch.equal(batch.tokens_1l[0, batch.rows_N] + 1, batch.labels_N)
        assert torch.equal(batch.segments.positions[batch.rows_N], batch.tokens_1l[0, batch.rows_N] % 100)
        given_N = weights.inputs(batch)
        assert torch.equal(given_N["place"].long(), batch.labels_N)
        lengths = torch.tensor([chosen[label // 100 - 1].response_tokens for label in batch.labels_N.tolist()])
        assert torch.allclose(given_N["weights"], 1 / (len(chosen) * lengths), rtol=1e-6)


def test_a_pack_that_is_not_shared_out_is_as_it_was() -> None:
    """Nothing is padded, and every token is here."""
    (batch,) = packs(
        [PlacedSample(0, torch.arange(5), 2), PlacedSample(1, torch.arange(3), 1)], 1, 1, sequence_parallel=False
    )
    assert batch.tokens_1l.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert (batch.rows_N.tolist(), batch.own_N.tolist()) == ([2, 3, 6], [0, 1, 2])
    assert batch.segments.chunks is None and batch.segments.lengths == (5, 3)


@pytest.mark.parametrize(("tokens", "cp", "padded"), [(7, 1, 7), (7, 2, 8), (8, 2, 8), (1, 4, 8), (9, 3, 12)])
def test_samples_are_padded_to_chunks(tokens: int, cp: int, padded: int) -> None:
    assert Grid(range(cp), 1, 1, cp=cp).padded(tokens) == padded
    assert replace(Grid(range(cp), 1, 1), cp=cp).model_ranks == cp
