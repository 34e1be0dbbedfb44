"""Parameters of the map that a rank has a shard of, whatever Megatron keeps them in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megappo.families.adapters import RowOrder
from megappo.families.parameters import Parameter


@dataclass(frozen=True)
class LocalShard:
    """A parameter of the map on a rank that has its shard."""

    entry: Parameter
    parameter: nn.Parameter
    """What Megatron trains: the shard, or those of all experts of this rank in one."""
    place: int | None = None
    """Of the shard in `parameter`, if that holds several."""

    @property
    def shard(self) -> Tensor:
        """The weights, without a gradient; they share the parameter's memory, and must be on the device."""
        return self.part_of(self.parameter.detach())

    @property
    def is_trained(self) -> bool:
        """Whether it ever changes."""
        return self.parameter.requires_grad

    @property
    def shape(self) -> torch.Size:
        """The shard's, wherever it lies."""
        return self.parameter.shape if self.place is None else self.parameter.shape[1:]

    def part_of(self, tensor: Tensor) -> Tensor:
        """What belongs to the shard in a tensor that is shaped as the parameter."""
        return tensor if self.place is None else tensor[self.place]

    @property
    def elements(self) -> slice:
        """The shard's in the flattened parameter."""
        size = self.parameter.numel() // (1 if self.place is None else len(self.parameter))
        start = size * (self.place or 0)
        return slice(start, start + size)


class LocalAdapterShard(NamedTuple):
    """What is added to a parameter of this rank."""

    a: LocalShard
    b: LocalShard
    order: RowOrder


def global_names(chunk: Any, name: str, canonical: Mapping[str, str]) -> Iterator[tuple[str, int | None]]:
    """What the map calls a parameter, or each part of one that holds several, with its place: Megatron numbers the
    layers of a chunk from 0, the map those of the model, and the map has a name for each expert."""
    parts = name.split(".")
    if parts[:2] != ["decoder", "layers"]:
        yield name, None
        return
    layer = chunk.decoder.layers[int(parts[2])]
    prefix, in_layer = f"decoder.layers.{layer.layer_number - 1}", ".".join(parts[3:])
    if parts[3:5] == ["mlp", "experts"]:
        for place, expert in enumerate(layer.mlp.local_expert_indices):
            yield f"{prefix}.mlp.experts.{expert}.{'.'.join(parts[5:])}", place
    else:
        yield f"{prefix}.{canonical.get(in_layer, in_layer)}", None
