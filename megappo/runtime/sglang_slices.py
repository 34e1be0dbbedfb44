"""Puts a rank's slices into the parameters of an SGLang engine; runs in the server's processes.

SGLang cuts whole Hugging Face tensors itself, so every rank of a server would have to be given all of them. Its option
`--custom-weight-loader` names a function that takes tensors in another form: this one takes what the rank's parameters
hold, in the order in which it stands there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megappo.runtime.packages import installed_version
from megappo.runtime.sglang_cpu import TRIED_VERSION

LOADER = "megappo.runtime.sglang_slices.load_slices"
"""What SGLang is told; also the `load_format` of requests."""


def has_loader() -> bool:
    """Whether the installed SGLang is the one that this was tried in; another one is given whole tensors."""
    return installed_version("sglang") == TRIED_VERSION


class SlicePlace(NamedTuple):
    """Where a run of bytes belongs."""

    name: str
    """The engine's parameter."""
    part: int
    parts: int
    """Which of so many equal parts of the parameter: an expert's; all of it where there is one."""
    zeros: int
    """Elements of padding after the run."""
    dtype: str
    start: int
    """Of the run in its payload, in bytes."""
    stop: int


def describe(places: Sequence[SlicePlace]) -> str:
    """For `load_slices`, in the place of a tensor's name."""
    return json.dumps(places)


def load_slices(model: Any, described: Sequence[tuple[str, Tensor]]) -> None:
    """Copy runs of bytes to where their descriptions say, and make what the model keeps besides of its parameters, as
    latent attention does of `kv_b_proj`.

    Raises ValueError for a parameter that is not there or is laid out in another way; SGLang ends with its words.
    """
    parameters, filled = dict(model.named_parameters()), set()
    for description, flat_bytes in described:
        for place in map(SlicePlace._make, json.loads(description)):
            run = flat_bytes[place.start : place.stop].view(getattr(torch, place.dtype))
            _fill(place, parameters.get(place.name), run)
            filled.add(place.name)
    if hasattr(model, "post_load_weights"):  # SGLang's own loaders call it as well (model_loader/loader.py:315)
        model.post_load_weights(weight_names=filled)


def _fill(place: SlicePlace, parameter: Tensor | None, run: Tensor) -> None:
    if parameter is None:
        raise ValueError(f"the engine has no parameter {place.name}")
    elements = place.parts * (run.numel() + place.zeros)
    if not parameter.is_contiguous() or parameter.dtype != run.dtype or parameter.numel() != elements:
        raise ValueError(
            f"the engine holds {place.name} as {tuple(parameter.shape)} of {parameter.dtype}, not as {elements} "
            f"elements of {run.dtype}; remove what changes that from rollout.sglang.arguments, or set "
            "rollout.sglang.verify: false"
        )
    target = parameter.data.view(place.parts, -1)[place.part]
    target[: run.numel()].copy_(run)
    target[run.numel() :].zero_()
