"""Copies a rank's slices into the parameters of an SGLang engine; runs in the server's processes.

SGLang cuts whole Hugging Face tensors itself, so every rank of a server would have to receive all of them. Its option
`--custom-weight-loader` names a function for tensors in another form: this one takes the content of the rank's
parameters, in the order in which it is stored there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megappo.runtime.packages import installed_version
from megappo.runtime.sglang_hooks import TRIED_VERSION

LOADER = "megappo.runtime.sglang_slices.load_slices"
"""Value of SGLang's option, and `load_format` of requests."""


def has_loader() -> bool:
    """Whether the installed SGLang is the version that this was tried with; others receive whole tensors."""
    return installed_version("sglang") == TRIED_VERSION


class SlicePlace(NamedTuple):
    """Place of a run of bytes in an engine's parameter."""

    name: str
    """Name of the engine's parameter."""
    part: int
    parts: int
    """Index of the part among `parts` equal ones of the parameter, such as an expert; the whole parameter where `parts`
    is 1."""
    zeros: int
    """Elements of padding after the run."""
    dtype: str
    start: int
    """First byte of the run in its payload."""
    stop: int


def describe(places: Sequence[SlicePlace]) -> str:
    """Description for `load_slices`, sent as the name of a tensor."""
    return json.dumps(places)


def load_slices(model: nn.Module, described: Sequence[tuple[str, Tensor]]) -> None:
    """Copy runs of bytes to the places that their descriptions name, and update what the model derives from its
    parameters, as latent attention does from `kv_b_proj`.

    Raises ValueError for a parameter that is missing or laid out differently; SGLang ends with that message.
    """
    parameters, filled = dict(model.named_parameters()), set()
    for description, flat_bytes in described:
        for place in map(SlicePlace._make, json.loads(description)):
            run = flat_bytes[place.start : place.stop].view(getattr(torch, place.dtype))
            _fill(place, parameters.get(place.name), run)
            filled.add(place.name)
    post_load = getattr(model, "post_load_weights", None)
    if post_load is not None:  # SGLang's own loaders call it as well (model_loader/loader.py:315)
        post_load(weight_names=filled)


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
