"""Weight syncs from Megatron to SGLang as in verl and slime, rewritten for the same actor and server.

Both gather every parameter separately: a broadcast over pipeline ranks, an all-gather over tensor parallel ranks, a
concatenation, and the conversion to Hugging Face tensors. Each operation allocates new memory.

- verl (verl/utils/megatron_utils.py: per_tensor_generator, verl/workers/rollout/sglang_rollout: update_weights)
  gathers one parameter at a time, and sends clones in one request with one handle per tensor.
- slime (slime/backends/megatron_utils/update_weight: hf_weight_iterator_direct.py, update_weight_from_tensor.py)
  starts the collectives of a bucket together, concatenates the tensors of the bucket, and sends one handle. The next
  bucket starts after the response of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.engines.sglang.client import call
from megappo.engines.sglang.weights.transport import flat_payload, serialize, share_by_name
from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import Parameter, shard_shape
from megappo.megatron.roles import LocalRole
from megappo.ppo.assembly.components import RunComponents
from megappo.reshard.slices import Receiver
from megappo.reshard.stream import Slot

_SECONDS = 600.0


def gather_parameters(parts: RunComponents, parameters: Sequence[Parameter], stage: int) -> list[tuple[str, Tensor]]:
    """Return the whole Hugging Face tensors of parameters of one pipeline stage, on every rank. All ranks of the
    actor must call the function."""
    actor, arch = parts.actor, parts.actor.arch
    assert isinstance(actor, LocalRole), "the actor must be on every rank"
    layout, grid = actor.layout, actor.placement.grid
    local_shards = {local.entry.megatron: local.shard for local in actor.model.local_parameters()}
    vocab = parts.derived.actor.padded_vocab_size
    dtype, device = parts.weights.dtype, parts.runtime.device
    shards, waits = [], []
    for parameter in parameters:
        shard = local_shards.get(parameter.megatron)
        if shard is None:
            shard = torch.empty(shard_shape(arch, parameter, grid.tp, vocab), dtype=dtype, device=device)
        if grid.pp > 1:
            source = grid.rank(layout.replica, stage, layout.tensor_rank)
            waits.append(dist.broadcast(shard, src=source, group=layout.groups.pp, async_op=True))
        shards.append(shard)
    _wait(waits)
    waits, gathered = [], []
    for parameter, shard in zip(parameters, shards, strict=True):
        parts_of_tensor = [shard]
        if grid.tp > 1 and parameter.axis is not None:
            parts_of_tensor = [torch.empty_like(shard) for _ in range(grid.tp)]
            waits.append(dist.all_gather(parts_of_tensor, shard, group=layout.groups.tp, async_op=True))
        gathered.append(parts_of_tensor)
    _wait(waits)
    return [
        named
        for parameter, parts_of_tensor in zip(parameters, gathered, strict=True)
        for named in zip(parameter.hf, _convert(arch, parameter, parts_of_tensor), strict=True)
    ]


def check_peers(parts: Any) -> None:
    """Raise AssertionError if the gathered tensors differ from the tensors of the weight stream."""
    streamed = {name: tensor.clone() for name, tensor in parts.weights}
    for bucket, stage in _buckets(parts):
        for name, tensor in gather_parameters(parts, bucket, stage):
            assert torch.equal(tensor, streamed.pop(name)), name
    assert not streamed


def _buckets(parts: RunComponents) -> Iterator[tuple[tuple[Parameter, ...], int]]:
    """Yield the parameters of each bucket, which are on one pipeline stage, and the stage."""
    weights = parts.weights
    whole = [Receiver(0, stage=stage) for stage in range(weights.holdings.grid.pp)]
    elements = parts.config.rollout.sync_bucket_bytes // weights.dtype.itemsize
    for bucket in weights.holdings.buckets(whole, elements):
        yield bucket, weights.holdings.stage_of[bucket[0].megatron]


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _convert(arch: ArchitectureConfig, parameter: Parameter, shards: list[Tensor]) -> list[Tensor]:
    if parameter.kind == "row":
        return [torch.cat(shards, dim=1)]
    if parameter.kind == "column":
        halves = [shard.chunk(2) for shard in shards]
        return list(torch.cat([h[0] for h in halves] + [h[1] for h in halves]).chunk(2))
    whole = torch.cat(shards) if len(shards) > 1 else shards[0]
    if parameter.kind == "qkv":
        per_group = arch.heads // arch.kv_heads
        grouped = whole.view(arch.kv_heads, per_group + 2, arch.head_dim, *whole.shape[1:])
        return [part.reshape(-1, *whole.shape[1:]) for part in grouped.split([per_group, 1, 1], dim=1)]
    if parameter.kind == "vocab":
        return [whole[: arch.vocab_size]]
    return [whole]


def verl_sync(parts: Any) -> Callable[[], None]:
    """Return verl's sync: gather tensor by tensor, and send all tensors in one request to the first server."""

    def run() -> None:
        named = [
            (name, tensor.clone())
            for bucket, stage in _buckets(parts)
            for parameter in bucket
            for name, tensor in gather_parameters(parts, [parameter], stage)
        ]
        _session(parts, [named], load_format=None)

    return run


def slime_sync(parts: Any) -> Callable[[], None]:
    """Return slime's sync: send each bucket as one flat tensor to the first server."""

    def run() -> None:
        buckets = (gather_parameters(parts, bucket, stage) for bucket, stage in _buckets(parts))
        _session(parts, (_flatten(named) for named in buckets), load_format="flattened_bucket")

    return run


def _flatten(named: list[tuple[str, Tensor]]) -> dict[str, Any]:
    flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in named])
    slots, start = [], 0
    for name, tensor in named:
        stop = start + tensor.numel() * tensor.element_size()
        slots.append(Slot(name, tensor.shape, tensor.dtype, start, stop))
        start = stop
    return flat_payload(flat, slots)


def _session(parts: Any, payloads: Any, load_format: str | None) -> None:
    """Create the payloads on every rank. The sender of the server sends them."""
    share_by_name()
    endpoint, ranks = parts.engine.endpoints[0], parts.config.rollout.server_settings.tensor_parallel
    sends = parts.runtime.rank == endpoint.sender
    if sends:
        call(endpoint, "/begin_weight_update", timeout_seconds=_SECONDS)
    for payload in payloads:
        if sends:
            handles = [serialize(payload) for _ in range(ranks)]
            body = {"serialized_named_tensors": handles, "load_format": load_format, "flush_cache": False}
            call(endpoint, "/update_weights_from_tensor", body, timeout_seconds=_SECONDS)
    if sends:
        call(endpoint, "/end_weight_update", timeout_seconds=_SECONDS)
