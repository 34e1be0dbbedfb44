"""Compare attention of packs that are split across ranks with whole attention in float64; see test_context_parallel.py.

Usage (under torchrun): context_worker.py CASE.json FOUND.json
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.megatron.context import ContextShard
from megappo.megatron.layers.attention import PackedCoreAttention
from megappo.megatron.segments import packed_segments, segment_tensors
from megappo.runtime.process import Runtime
from tests.support.workers import answer_of_all_ranks

HEADS, WIDTH, SCALE = 4, 8, 0.4


def exact(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """Return (t, h, d) attention of float64 inputs. All pairs of tokens are scored, then the invisible pairs are
    masked."""
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    place = torch.arange(len(segment))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    distance = place[:, None] - place[None]
    seen = (segment[:, None] == segment[None]) & (distance >= 0) & (distance < (window or len(place)))
    scores = torch.einsum("ihd,jhd->hij", query, key) * SCALE
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def errors(case: dict[str, Any], runtime: Runtime) -> dict[str, float]:
    """Return the largest relative error of the output and of each gradient on this rank."""
    from megatron.core.transformer.transformer_config import TransformerConfig  # after megappo has prepared megatron

    lengths, window, groups = case["lengths"], case["window"], case["groups"]
    g, total = torch.Generator().manual_seed(3), sum(lengths)
    shapes = {"query": (total, HEADS, WIDTH), "key": (total, groups, WIDTH), "value": (total, groups, WIDTH)}
    whole = {name: torch.randn(shape, generator=g).double().requires_grad_() for name, shape in shapes.items()}
    truth = exact(whole["query"], whole["key"], whole["value"], lengths, window)
    upstream = torch.randn(truth.shape, generator=g)
    truth.backward(upstream.double())

    shard = ContextShard(runtime.world_size, runtime.rank)
    places, dtype = shard.places(lengths), getattr(torch, case["dtype"])
    mine = {name: x.detach()[places].to(dtype).requires_grad_() for name, x in whole.items()}
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, attention_dropout=0.0,
        window_size=None if window is None else (window - 1, 0),
    )  # fmt: skip
    core: Any = PackedCoreAttention(
        config, 1, None, "self", softmax_scale=SCALE, pg_collection=SimpleNamespace(cp=dist.group.WORLD)
    )
    segments = packed_segments(lengths, segment_tensors(lengths, shard), shard)
    out = core(*mine.values(), None, packed_seq_params=segments)
    out.backward(upstream[places].flatten(1).to(dtype))
    compared = {"output": (out.view(-1, HEADS, WIDTH), truth[places])}
    for name, x in mine.items():
        of_whole = whole[name].grad
        assert x.grad is not None and of_whole is not None
        compared[name] = x.grad, of_whole[places]
    return {name: float((x.double() - y).norm() / y.norm()) for name, (x, y) in compared.items()}


if __name__ == "__main__":
    answer_of_all_ranks(lambda cases, runtime: {name: errors(case, runtime) for name, case in cases.items()})
