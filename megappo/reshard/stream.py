"""The weight stream: from the shards of a layout to whole Hugging Face tensors on every rank, in buckets of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.architecture import ArchitectureConfig
from megappo.models.build import RoleModel
from megappo.models.layout import Grid
from megappo.reshard.hf_map import Parameter, hf_shape, model_parameters, pieces, scatter_shard, shard_shape


def _tensor_bytes(arch: ArchitectureConfig, parameter: Parameter, dtype: torch.dtype) -> int:
    return dtype.itemsize * sum(torch.Size(hf_shape(arch, name)).numel() for name in parameter.hf)


@dataclass(frozen=True)
class _Bucket:
    stage: int
    parameters: tuple[Parameter, ...]


class WeightStream:
    """Streams a role's weights to every rank of the world.

    Memory beyond the weights: one bucket of shards per tensor rank and the tensors made of them, so at most two
    buckets, or the largest tensor where that is larger.
    """

    def __init__(
        self,
        grid: Grid,
        arch: ArchitectureConfig,
        model: RoleModel | None,
        *,
        padded_vocab: int,
        dtype: torch.dtype,
        device: torch.device,
        bucket_bytes: int,
    ) -> None:
        """A collective of the world: ranks tell each other which parameters they hold."""
        self._grid, self._arch, self._padded_vocab = grid, arch, padded_vocab
        self._dtype, self._device = dtype, device
        self._here = {p.megatron: t for p, t in model.parameters_here()} if model is not None else {}
        held: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(held, list(self._here))
        stage_of = {name: s for s in range(grid.pp) for name in held[grid.rank(0, s, 0)]}
        self._buckets = self._plan(stage_of, bucket_bytes)
        self.total_bytes = sum(_tensor_bytes(arch, p, dtype) for b in self._buckets for p in b.parameters)

    def _plan(self, stage_of: dict[str, int], bucket_bytes: int) -> list[_Bucket]:
        buckets: list[_Bucket] = []
        current: list[Parameter] = []
        size, stage = 0, -1
        held = [p for p in model_parameters(self._arch) if p.megatron in stage_of]  # a critic has no LM head
        for parameter in held:
            n_bytes = _tensor_bytes(self._arch, parameter, self._dtype)
            if current and (stage_of[parameter.megatron] != stage or size + n_bytes > bucket_bytes):
                buckets.append(_Bucket(stage, tuple(current)))
                current, size = [], 0
            stage = stage_of[parameter.megatron]
            current.append(parameter)
            size += n_bytes
        return [*buckets, _Bucket(stage, tuple(current))]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) in a fixed order; a collective of the world, to be consumed by all."""
        for bucket in self._buckets:
            yield from self._gather(bucket).items()

    def _gather(self, bucket: _Bucket) -> dict[str, Tensor]:
        arch, grid = self._arch, self._grid
        shapes = [shard_shape(arch, p, grid.tp, self._padded_vocab) for p in bucket.parameters]
        whole = {
            name: torch.empty(hf_shape(arch, name), dtype=self._dtype, device=self._device)
            for parameter in bucket.parameters
            for name in parameter.hf
        }
        for tensor_rank in range(grid.tp):
            source = grid.rank(0, bucket.stage, tensor_rank)
            if dist.get_rank() == source:
                flat = torch.cat([self._here[p.megatron].detach().flatten() for p in bucket.parameters])
            else:
                size = sum(s.numel() for s in shapes)
                flat = torch.empty(size, dtype=self._dtype, device=self._device)
            dist.broadcast(flat, src=source)
            for parameter, shape, shard in zip(
                bucket.parameters, shapes, flat.split([s.numel() for s in shapes]), strict=True
            ):
                slices = pieces(arch, parameter, tensor_rank, grid.tp, self._padded_vocab)
                scatter_shard(shard.view(shape), slices, whole)
        return whole
