"""Packed attention in bfloat16 on a GPU agrees with float32 within the rounding of bfloat16."""

from __future__ import annotations

import itertools

import pytest
import torch

import megappo.megatron  # noqa: F401
from megappo.megatron.attention import attend_pack, packed_segments, segment_tensors, takes_packs
from megappo.runtime.transfer import to_device

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LENGTHS = (130, 1, 517, 64)


@pytest.mark.parametrize(("window", "groups", "width"), itertools.product((None, 100), (4, 1), (64, 128)))
def test_attention_of_a_pack(window: int | None, groups: int, width: int) -> None:
    assert takes_packs(torch.bfloat16, width, torch.cuda.get_device_capability())
    device, g = torch.device("cuda"), torch.Generator().manual_seed(1)
    segments, total = packed_segments(LENGTHS, to_device(segment_tensors(LENGTHS), device)), sum(LENGTHS)
    inputs = [torch.randn(total, n, width, generator=g).to(device, torch.bfloat16) for n in (4, groups, groups)]
    leaves = [x.requires_grad_() for x in inputs]
    query, key, value = leaves
    out = attend_pack(query, key, value, segments, scale=width**-0.5, window=window)
    weights = torch.randn(out.shape, generator=g).to(device)
    gradients = torch.autograd.grad((out.float() * weights).sum(), leaves)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    pieces = []
    for q, k, v in zip(*(x.split(LENGTHS) for x in exact), strict=True):
        k, v = (x.repeat_interleave(4 // groups, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * width**-0.5
        places = torch.arange(len(q), device=device)
        distance = places[None] - places[:, None]
        hidden = (distance > 0) | (distance <= -(window or len(q)))
        pieces.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    truth = torch.cat(pieces)
    true_gradients = torch.autograd.grad((truth * weights).sum(), exact)
    for mine, theirs in zip((out, *gradients), (truth, *true_gradients), strict=True):
        assert float((mine.float() - theirs).norm() / theirs.norm()) < 0.02
