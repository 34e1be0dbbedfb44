"""The weight stream: from the shards of a layout to whole Hugging Face tensors, in buckets of bytes.

Every bucket is one flat run of bytes in which the tensors stand one after another. It is filled in one of two ways:
by broadcasts, which works between any ranks and fills it on every rank, or in memory that all ranks of one machine
share, into which each rank copies its own slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.errors import RunError, first_of
from megappo.families.declaration import Shape
from megappo.families.parameters import (
    OUTPUT_LAYER,
    Parameter,
    expert_share,
    model_parameters,
    pieces,
    shard_shape,
)
from megappo.families.weights import scatter_shard
from megappo.runtime.objects import of_all_ranks

if TYPE_CHECKING:
    from megappo.megatron.roles import Role


class Slot(NamedTuple):
    """Where a tensor stands in its bucket."""

    name: str
    shape: Shape
    dtype: torch.dtype
    start: int
    """Offset of its first byte in the bucket."""
    stop: int

    def view(self, flat_bytes: Tensor) -> Tensor:
        """The tensor inside a bucket's bytes."""
        return flat_bytes[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Parameters of one pipeline stage that travel together."""

    stage: int
    parameters: tuple[Parameter, ...]
    slots: tuple[Slot, ...]

    @property
    def n_bytes(self) -> int:
        """Size of the bucket."""
        return self.slots[-1].stop


class _Source(NamedTuple):
    """A rank and the parameters of a bucket that it has shards of."""

    rank: int
    tensor_rank: int
    parameters: tuple[Parameter, ...]


class WeightStream:
    """Streams a role's weights to every rank of the world.

    Memory beyond the weights: one bucket of shards and the tensors made of them, so at most two
    buckets, or the largest tensor where that is larger.
    """

    def __init__(self, role: Role, bucket_bytes: int) -> None:
        """A collective of the world: ranks tell each other which parameters they hold.

        Raises RunError where there are parameters that none of them holds.
        """
        self.arch, options, grid = role.arch, role.options, role.placement.grid
        self._grid, self._padded_vocab = grid, options.padded_vocab
        self._dtype, self._device = options.dtype, options.device
        self._here = {held.entry.megatron: held for held in role.mapped_parameters()}
        self._read = role.read_shard
        held = of_all_ranks(list(self._here))
        stage_of = {name: s for s in range(grid.pp) for r in grid.stage_ranks(s) for name in held[r]}
        self._check_whole(stage_of, is_critic=options.is_critic)
        self.buckets = tuple(self._plan(stage_of, bucket_bytes))
        self.total_bytes = sum(p.elements * options.dtype.itemsize for b in self.buckets for p in b.parameters)

    @property
    def largest_bucket_bytes(self) -> int:
        """What a buffer must hold."""
        return max(bucket.n_bytes for bucket in self.buckets)

    def _check_whole(self, stage_of: dict[str, int], *, is_critic: bool) -> None:
        missing = [p.megatron for p in model_parameters(self.arch) if p.megatron not in stage_of]
        if missing and not (is_critic and missing == [OUTPUT_LAYER]):
            raise RunError(
                f"no rank holds {first_of(missing, 3)} of the model; install the versions that setup.py asks for"
            )

    def _plan(self, stage_of: dict[str, int], bucket_bytes: int) -> Iterator[Bucket]:
        current: list[Parameter] = []
        size, stage = 0, -1
        held = [p for p in model_parameters(self.arch) if p.megatron in stage_of]  # all but a critic's LM head
        for parameter in held:
            n_bytes = parameter.elements * self._dtype.itemsize
            if current and (stage_of[parameter.megatron] != stage or size + n_bytes > bucket_bytes):
                yield self._bucket(stage, current)
                current, size = [], 0
            stage = stage_of[parameter.megatron]
            current.append(parameter)
            size += n_bytes
        yield self._bucket(stage, current)

    def _bucket(self, stage: int, parameters: list[Parameter]) -> Bucket:
        slots, start = [], 0
        for parameter in parameters:
            for name, shape in parameter.tensors.items():
                stop = start + math.prod(shape) * self._dtype.itemsize
                slots.append(Slot(name, shape, self._dtype, start, stop))
                start = stop
        return Bucket(stage, tuple(parameters), tuple(slots))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) in a fixed order; a collective of the world, to be consumed by all."""
        for bucket in self.buckets:
            flat = torch.empty(bucket.n_bytes, dtype=torch.uint8, device=self._device)
            self.gather(bucket, flat)
            yield from ((slot.name, slot.view(flat)) for slot in bucket.slots)

    def gather(self, bucket: Bucket, flat_bytes: Tensor) -> None:
        """Fill `flat_bytes` on every rank by broadcasts; a collective of the world."""
        arch, grid = self.arch, self._grid
        whole = {slot.name: slot.view(flat_bytes) for slot in bucket.slots}
        for source in self._sources(bucket):
            shapes = [shard_shape(arch, p, grid.tp, self._padded_vocab) for p in source.parameters]
            if dist.get_rank() == source.rank:
                flat = torch.cat([self._read(self._here[p.megatron]).flatten() for p in source.parameters])
            else:
                flat = torch.empty(sum(map(math.prod, shapes)), dtype=self._dtype, device=self._device)
            dist.broadcast(flat, src=source.rank)
            shards = flat.split([math.prod(shape) for shape in shapes])
            for parameter, shape, shard in zip(source.parameters, shapes, shards, strict=True):
                slices = pieces(arch, parameter, source.tensor_rank, grid.tp, self._padded_vocab)
                scatter_shard(shard.view(shape), slices, whole)

    def _sources(self, bucket: Bucket) -> Iterator[_Source]:
        """Ranks that together hold one copy of a bucket: the first replica's, and those of the first experts."""
        arch, grid = self.arch, self._grid
        shared = tuple(p for p in bucket.parameters if p.expert is None)
        if shared:
            for tensor_rank in range(grid.tp):
                yield _Source(grid.rank(0, bucket.stage, tensor_rank), tensor_rank, shared)
        for expert_rank in range(grid.ep):
            own = tuple(p for p in bucket.parameters if expert_share(arch, p, grid.ep) == expert_rank)
            if own:
                yield _Source(grid.expert_owner(bucket.stage, expert_rank), 0, own)

    def write_own(self, bucket: Bucket, flat_bytes: Tensor) -> None:
        """Copy what this rank holds into memory that all ranks share; whole once every rank of the role has done so.

        One copy of the model: the ranks that would send it write.
        """
        whole = {slot.name: slot.view(flat_bytes) for slot in bucket.slots}
        for source in self._sources(bucket):
            for parameter in source.parameters if source.rank == dist.get_rank() else ():
                slices = pieces(self.arch, parameter, source.tensor_rank, self._grid.tp, self._padded_vocab)
                if parameter.axis is None and source.tensor_rank != 0:
                    continue
                scatter_shard(self._read(self._here[parameter.megatron]), slices, whole)
