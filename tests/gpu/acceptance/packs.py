"""Packs of few and of many segments: a packed sample is what it is alone, and what each costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megappo.megatron.placed import announce
from megappo.megatron.placed import place as placed_on
from megappo.ppo.trainer import Trainer
from tests.gpu.acceptance.ppo_step import update_speed
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, Skip, measured, within
from tests.gpu.acceptance.workload import (
    ACTOR_ONLY,
    Size,
    make_config,
    model_folder,
    rollouts,
    samples,
    settings,
    trainer,
)

NATS = {"float32": 1e-4, "bfloat16": 0.05}
"""Bound of the mean gap of log-probabilities that were computed in packs of another shape."""


@dataclass(frozen=True)
class Shape:
    """Of one pack."""

    segments: int
    tokens: int
    """Of each."""


def shapes_of(place: Place) -> list[Shape]:
    """1, 16 and 128 segments of as many tokens together, and one of 32k."""
    if place.tiny:
        return [Shape(1, 64), Shape(4, 32), Shape(16, 4), Shape(1, 256)]
    return [Shape(1, 16384), Shape(16, 1024), Shape(128, 128), Shape(1, 32768)]


def shapes(place: Place) -> Iterator[Row]:
    """Each pack forward and backward."""
    dtype = "float32" if place.device == "cpu" else "bfloat16"
    for shape in shapes_of(place):
        yield from _shape(place, shape, dtype)


def _shape(place: Place, shape: Shape, dtype: str) -> Iterator[Row]:
    what = f"{shape.segments} x {shape.tokens} tokens, {dtype}"
    folder = model_folder(place, "0.6B")
    response = shape.tokens // 2
    size = Size(shape.segments, shape.tokens - response, response)
    words = [*ACTOR_ONLY, "actor.recompute=full"] if shape.tokens > 20000 else ACTOR_ONLY
    with trainer(make_config(place, settings(place, folder, size, dtype), words)) as t:
        gap = alone_gap(t, size, folder) if shape.segments > 1 else truncated_gap(t, size, folder)
        yield within(f"{what}: as alone" if shape.segments > 1 else f"{what}: as cut short", gap, NATS[dtype])
        try:
            found = update_speed(place, t, size, folder, 1 if place.tiny else 2)
        except torch.cuda.OutOfMemoryError as error:
            raise Skip(f"{what}: out of memory: {str(error).splitlines()[0]}") from None
        yield measured(
            what, f"{found.words(place)}, peak {found.peak_bytes / 1e9:.1f} GB", seconds=found.seconds,
            tokens_per_second=found.tokens / found.seconds, peak_bytes=found.peak_bytes,
        )  # fmt: skip


def logprobs(t: Trainer, given: list[dict[str, Any]], budget_tokens: int) -> list[Tensor]:
    """Of each sample's response, in packs of so many tokens."""
    actor, rollout = t.parts.actor, rollouts(given)[0]
    usual = actor.placement
    actor.placement = replace(usual, budget_tokens=budget_tokens)
    output_BR = placed_on(actor, announce(rollout, t.parts.runtime.device)).forward()
    actor.placement = usual
    return list(output_BR[rollout.response_mask_BR].split(rollout.response_lengths_B.tolist()))


def alone_gap(t: Trainer, size: Size, folder: Path) -> dict[str, float]:
    """Mean gap between samples in one pack and each in a pack of its own, ragged, so that places differ."""
    given = samples(size, folder, ragged=True)
    most = max(len(s["tokens"]) for s in given)
    packed = logprobs(t, given, size.samples * (size.prompt + size.response))
    alone = [logprobs(t, [sample], most)[0] for sample in given[:4]]
    return {"mean gap, nats": float((torch.cat(packed[:4]) - torch.cat(alone)).abs().mean())}


def truncated_gap(t: Trainer, size: Size, folder: Path) -> dict[str, float]:
    """Mean gap to the same sample without its last quarter: later tokens must not be seen."""
    (whole,) = samples(size, folder, ragged=False)
    cut = size.response // 2
    short = {**whole, "tokens": whole["tokens"][:-cut], "response": whole["response"] - cut}
    budget = size.prompt + size.response
    (a,), (b,) = logprobs(t, [whole], budget), logprobs(t, [short], budget)
    return {"mean gap, nats": float((a[: len(b)] - b).abs().mean())}
