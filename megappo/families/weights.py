"""Protocols of weight sources, and the conversion between slices of Hugging Face tensors and shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megappo.families.declaration import ArchitectureConfig
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
        """Read a slice to the CPU."""
        ...

    def value_head(self) -> ValueHeadWeights | None:
        """Return the trained scalar head of a critic, on the CPU, or None for other models."""
        ...


class TensorSource(Protocol):
    """Source of a whole model, tensor by tensor."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, float32 tensor) pairs in the order of Hugging Face."""
        ...

    def value_head(self) -> ValueHeadWeights | None:
        """Return the scalar head; see `WeightSource`."""
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
    """Read the shard of this rank for a parameter, on the CPU, with the shape and dtype of `like`."""
    shard_pieces = pieces(arch, parameter, tensor_rank, tp, padded_vocab)
    shard = _assembled([source.read(p) for p in shard_pieces], shard_pieces[0].dim, rows=like.shape[0])
    assert shard.shape == like.shape, f"{parameter.megatron}: {tuple(shard.shape)} for {tuple(like.shape)}"
    return shard.to(like.dtype)


def _assembled(parts: list[Tensor], dim: int, *, rows: int) -> Tensor:
    """Concatenate the slices of a shard, and append zero rows for the padding of the vocabulary."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    missing = rows - whole.shape[0]
    return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]) if missing else whole


def scatter_shard(shard: Tensor, shard_pieces: list[Piece], into: dict[str, Tensor]) -> None:
    """Copy a shard into the whole Hugging Face tensors `into`, without its padding rows."""
    offset = 0
    for piece in shard_pieces:
        source = shard.narrow(piece.dim, offset, piece.size)
        into[piece.name].narrow(piece.dim, piece.start, piece.size).copy_(source)
        offset += piece.size
