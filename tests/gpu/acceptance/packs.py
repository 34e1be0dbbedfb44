"""Packs of few and many segments: packed samples must equal separate samples; time and memory are measured."""

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
"""Bound of the mean gap of log-probabilities between packs of different shapes."""


@dataclass(frozen=True)
class Shape:
    """Shape of a pack."""

    segments: int
    tokens: int
    """Tokens of each segment."""


def shapes_of(place: Place) -> list[Shape]:
    """Return packs of 1, 16 and 128 segments with the same total, and one pack of 32k tokens."""
    if place.tiny:
        return [Shape(1, 64), Shape(4, 32), Shape(16, 4), Shape(1, 256)]
    return [Shape(1, 16384), Shape(16, 1024), Shape(128, 128), Shape(1, 32768)]


def shapes(place: Place) -> Iterator[Row]:
    """Run each pack forward and backward."""
    dtype = "float32" if place.device == "cpu" else "bfloat16"
    for shape in shapes_of(place):
        yield from _shape(place, shape, dtype)


def _shape(place: Place, shape: Shape, dtype: str) -> Iterator[Row]:
    what = f"{shape.segments} x {shape.tokens} tokens, {dtype}"
    folder = model_folder(place, "0.6B")
    response = shape.tokens // 2
    size = Size(shape.segments, shape.tokens - response, response)
    overrides = [*ACTOR_ONLY, "actor.recompute=full"] if shape.tokens > 20000 else ACTOR_ONLY
    with trainer(make_config(place, settings(place, folder, size, dtype), overrides)) as t:
        gap = alone_gap(t, size, folder) if shape.segments > 1 else truncated_gap(t, size, folder)
        yield within(f"{what}: as alone" if shape.segments > 1 else f"{what}: as cut short", gap, NATS[dtype])
        try:
            speed = update_speed(place, t, size, folder, 1 if place.tiny else 2)
        except torch.cuda.OutOfMemoryError as error:
            raise Skip(f"{what}: out of memory: {str(error).splitlines()[0]}") from None
        yield measured(
            what, f"{speed.summary(place)}, peak {speed.peak_bytes / 1e9:.1f} GB", seconds=speed.seconds,
            tokens_per_second=speed.tokens / speed.seconds, peak_bytes=speed.peak_bytes,
        )  # fmt: skip


def logprobs(t: Trainer, batch: list[dict[str, Any]], budget_tokens: int) -> list[Tensor]:
    """Return the log-probabilities of each response, computed in packs of `budget_tokens` tokens."""
    actor, rollout = t.parts.actor, rollouts(batch)[0]
    usual = actor.placement
    actor.placement = replace(usual, budget_tokens=budget_tokens)
    output_BR = placed_on(actor, announce(rollout, t.parts.runtime.device)).forward()
    actor.placement = usual
    return list(output_BR[rollout.response_mask_BR].split(rollout.response_lengths_B.tolist()))


def alone_gap(t: Trainer, size: Size, folder: Path) -> dict[str, float]:
    """Return the mean gap between samples in one pack and each sample in a separate pack. The samples are ragged, so
    their positions in the pack differ."""
    batch = samples(size, folder, ragged=True)
    most = max(len(s["tokens"]) for s in batch)
    packed = logprobs(t, batch, size.samples * (size.prompt + size.response))
    alone = [logprobs(t, [sample], most)[0] for sample in batch[:4]]
    return {"mean gap, nats": float((torch.cat(packed[:4]) - torch.cat(alone)).abs().mean())}


def truncated_gap(t: Trainer, size: Size, folder: Path) -> dict[str, float]:
    """Return the mean gap to the same sample without its last quarter, because later tokens must not be visible."""
    (whole,) = samples(size, folder, ragged=False)
    cut = size.response // 2
    short = {**whole, "tokens": whole["tokens"][:-cut], "response": whole["response"] - cut}
    budget = size.prompt + size.response
    (a,), (b,) = logprobs(t, [whole], budget), logprobs(t, [short], budget)
    return {"mean gap, nats": float((a[: len(b)] - b).abs().mean())}
