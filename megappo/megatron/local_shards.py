"""Shards of mapped parameters on this rank, independent of their storage in Megatron."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from megappo.families.adapters import RowOrder
from megappo.families.parameters import Parameter

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel


@dataclass(frozen=True)
class LocalShard:
    """Shard of a mapped parameter on this rank."""

    entry: Parameter
    parameter: nn.Parameter
    """Parameter that Megatron trains: the shard, or a stack of the shards of all experts of this rank."""
    place: int | None = None
    """Index of the shard in a stacked `parameter`; None if the parameter is the shard."""

    @property
    def shard(self) -> Tensor:
        """Weights of the shard without gradient. The tensor shares the memory of the parameter, which must be on the
        device."""
        return self.part_of(self.parameter.detach())

    @property
    def is_trained(self) -> bool:
        """Whether the shard is trained."""
        return self.parameter.requires_grad

    @property
    def shape(self) -> torch.Size:
        """Shape of the shard."""
        return self.parameter.shape if self.place is None else self.parameter.shape[1:]

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the part of the shard in a tensor with the shape of the parameter."""
        return tensor if self.place is None else tensor[self.place]

    @property
    def elements(self) -> slice:
        """Elements of the shard in the flattened parameter."""
        size = self.parameter.numel() // (1 if self.place is None else len(self.parameter))
        start = size * (self.place or 0)
        return slice(start, start + size)


class LocalAdapterShard(NamedTuple):
    """Adapter matrices A and B of a parameter of this rank."""

    a: LocalShard
    b: LocalShard
    order: RowOrder


def global_names(chunk: GPTModel, name: str, canonical: Mapping[str, str]) -> Iterator[tuple[str, int | None]]:
    """Yield the global names of a chunk's parameter, each with its index in a stacked parameter or None.

    Megatron numbers the layers of a chunk from 0 and stacks experts. The map numbers the layers of the whole model and
    has a name for each expert.
    """
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
