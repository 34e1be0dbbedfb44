"""Loader that copies slices of a rank into the parameters of an SGLang engine. It runs in the processes of the server.

SGLang's own loaders cut whole Hugging Face tensors, so every rank of a server would have to receive all of them. The
option `--custom-weight-loader` of SGLang names a function for tensors in a different form. The function in this module
receives the content of the parameters of the rank, in the order in which the engine stores the content.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

LOADER = "megappo.engines.sglang.weights.slice_loader.load_slices"
"""Value of SGLang's option, and `load_format` of requests."""


class SlicePlace(NamedTuple):
    """Place of a range of bytes in a parameter of an engine."""

    name: str
    """Name of the parameter."""
    part: int
    parts: int
    """Index of the part among `parts` equal parts of the parameter, for example an expert. If `parts` is 1, the part is
    the whole parameter."""
    zeros: int
    """Elements of padding after the range."""
    dtype: str
    start: int
    """First byte of the range in its payload."""
    stop: int


def describe(places: Sequence[SlicePlace]) -> str:
    """Return the description of the places for `load_slices`. The description is sent as the name of a tensor."""
    return json.dumps(places)


def load_slices(model: nn.Module, described: Sequence[tuple[str, Tensor]]) -> None:
    """Copy ranges of bytes to the places in their descriptions, and update values that the model derives from its
    parameters. For example, latent attention derives values from `kv_b_proj`.

    Raises ValueError for a parameter that is missing or has a different layout. SGLang ends with the message.
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
            f"elements of {run.dtype}; remove arguments that change the layout from rollout.servers.arguments, or set "
            "rollout.servers.verify: false"
        )
    target = parameter.data.view(place.parts, -1)[place.part]
    target[: run.numel()].copy_(run)
    target[run.numel() :].zero_()
