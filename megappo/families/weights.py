"""Protocols of weight sources, and how slices of Hugging Face tensors become shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megappo.families.architecture import ArchitectureConfig
from megappo.families.parameters import Parameter, Piece, pieces


class ValueHeadWeights(NamedTuple):
    """Weights of a critic's output layer."""

    weight: Tensor
    """(1, H)"""
    bias: Tensor
    """(1,)"""


class WeightSource(Protocol):
    """Source of slices of Hugging Face tensors."""

    def read(self, piece: Piece) -> Tensor:
        """Read a slice, on the CPU."""
        ...

    def value_head(self) -> ValueHeadWeights | None:
        """The trained scalar head of a critic, on the CPU; None where there is none."""
        ...


class TensorSource(Protocol):
    """Source of a whole model, tensor by tensor."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) in Hugging Face's order, in float32."""
        ...

    def value_head(self) -> ValueHeadWeights | None:
        """See `WeightSource`."""
        ...


def read_shard(
    source: WeightSource,
    arch: ArchitectureConfig,
    parameter: Parameter,
    like: Tensor,
    tensor_rank: int,
    tp: int,
    padded_vocab: int,
) -> Tensor:
    """Read this rank's shard of a parameter in the shape and type of `like`, on the CPU."""
    shard_pieces = pieces(arch, parameter, tensor_rank, tp, padded_vocab)
    shard = _assembled([source.read(p) for p in shard_pieces], shard_pieces[0].dim, rows=like.shape[0])
    assert shard.shape == like.shape, f"{parameter.megatron}: {tuple(shard.shape)} for {tuple(like.shape)}"
    return shard.to(like.dtype)


def _assembled(parts: list[Tensor], dim: int, *, rows: int) -> Tensor:
    """Concatenate the slices of a shard and fill up with zero rows (padded vocabulary)."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    missing = rows - whole.shape[0]
    return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]) if missing else whole


def scatter_shard(shard: Tensor, shard_pieces: list[Piece], into: dict[str, Tensor]) -> None:
    """Copy a shard back into the whole Hugging Face tensors `into`; rows of padding are dropped."""
    offset = 0
    for piece in shard_pieces:
        source = shard.narrow(piece.dim, offset, piece.size)
        into[piece.name].narrow(piece.dim, piece.start, piece.size).copy_(source)
        offset += piece.size
