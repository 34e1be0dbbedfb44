"""Distribution of a pack over context ranks: the tokens of each rank, the visible keys, and the labels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.config.grid import Grid
from megappo.megatron.context import ContextShard
from megappo.megatron.layout import Layout
from megappo.megatron.schedule import PackedBatch, PlacedSample, pack_samples
from megappo.megatron.segments import packed_segments, segment_tensors
from megappo.ppo.updates import LossWeights

CPU = torch.device("cpu")
SIZES = st.sampled_from([2, 3, 4])
PADDED = st.lists(st.integers(1, 5), min_size=1, max_size=6)
"""Strategy for lengths of chunks."""


@st.composite
def samples(draw: st.DrawFn) -> list[PlacedSample]:
    """Draw samples with a prompt and a response. The tokens encode the sample and the position."""
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
    """Return the packs of all context ranks for the same samples."""
    grid, nothing = Grid(range(cp * tp), tp, 1, cp=cp), cast(Any, None)
    layouts = [Layout(grid, 1, sequence_parallel, 0, 0, c, 0, 0, 0, nothing, nothing) for c in range(cp)]
    return [pack_samples(chosen, CPU, shard=la.shard, multiple_of=la.token_multiple) for la in layouts]


def test_pack_by_hand() -> None:
    """Two ranks share segments of eight and four tokens. One rank has the first and last quarters, and the other
    rank has the middle quarters."""
    first, second = ContextShard(2, 0), ContextShard(2, 1)
    assert first.places([8, 4]).tolist() == [0, 1, 6, 7, 8, 11]
    assert second.places([8, 4]).tolist() == [2, 3, 4, 5, 9, 10]
    segments = packed_segments((8, 4), segment_tensors((8, 4), second), second)
    assert segments.positions.tolist() == [2, 3, 4, 5, 1, 2]
    assert segments.cu_seqlens_q.tolist() == segments.cu_seqlens_kv.tolist() == [0, 8, 12]  # format of Megatron
    assert segments.chunks is not None and segments.chunks.key_rows is not None
    assert (segments.chunks.lengths, segments.chunks.key_lengths) == ((2, 2, 1, 1), (4, 6, 2, 3))
    assert segments.chunks.key_rows.tolist() == [0, 1, 6, 7, 0, 1, 6, 7, 8, 9, 4, 10, 4, 10, 11]


@given(SIZES, PADDED)
def test_tokens_and_attention_work_are_balanced(size: int, chunks: list[int]) -> None:
    lengths = [2 * size * chunk for chunk in chunks]
    positions = torch.cat([torch.arange(n) for n in lengths])
    shards = [ContextShard(size, rank) for rank in range(size)]
    places = [shard.places(lengths) for shard in shards]
    assert sorted(torch.cat(places).tolist()) == list(range(sum(lengths)))
    assert {len(mine) for mine in places} == {sum(lengths) // size}
    assert len({int((positions[mine] + 1).sum()) for mine in places}) == 1
    assert len({len(shard.key_rows(lengths)) for shard in shards}) == 1


@given(SIZES, PADDED)
def test_chunks_attend_to_previous_tokens(size: int, chunks: list[int]) -> None:
    """The keys of all ranks are concatenated. Each chunk selects the keys of its segment from the start to the end
    of the chunk."""
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
def test_positions_of_all_ranks_are_complete(size: int, chunks: list[int], random: Any) -> None:
    lengths = [2 * size * chunk for chunk in chunks]
    positions = torch.tensor(sorted(random.sample(range(sum(lengths)), random.randint(1, sum(lengths)))))
    whole = torch.zeros(len(positions), dtype=torch.int64)
    for rank in range(size):
        shard = ContextShard(size, rank)
        rows, own = shard.find(positions, lengths)
        assert torch.equal(shard.places(lengths)[rows], positions[own])
        whole.index_add_(0, own, shard.places(lengths)[rows] + 1)
    assert torch.equal(whole, positions + 1)  # each position once


@given(samples(), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3]), st.booleans())
def test_response_can_be_split_anywhere(chosen: list[PlacedSample], cp: int, tp: int, sequence_parallel: bool) -> None:
    """Each response token is predicted once, on the rank of the previous token, with the fields of the response
    token."""
    batches = packs(chosen, cp, tp, sequence_parallel=sequence_parallel)
    labels = [label for batch in batches for label in batch.labels_N.tolist()]
    assert sorted(labels) == sorted(t for s in chosen for t in s.tokens_T[-s.response_tokens :].tolist())
    assert len({batch.tokens_1l.shape for batch in batches}) == 1
    weights = LossWeights("seq-mean-token-mean", tokens=999, sequences=len(chosen), norm_tokens=1)
    for batch in batches:
        assert not sequence_parallel or batch.tokens_1l.shape[1] % tp == 0
        assert torch.equal(batch.tokens_1l[0, batch.rows_N] + 1, batch.labels_N)
        assert torch.equal(batch.segments.positions[batch.rows_N], batch.tokens_1l[0, batch.rows_N] % 100)
        inputs_N = weights.inputs(batch)
        assert torch.equal(inputs_N["place"].long(), batch.labels_N)
        lengths = torch.tensor([chosen[label // 100 - 1].response_tokens for label in batch.labels_N.tolist()])
        assert torch.allclose(inputs_N["weights"], 1 / (len(chosen) * lengths), rtol=1e-6)


def test_pack_of_one_rank_is_unchanged() -> None:
    """A single rank has all tokens without padding."""
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
