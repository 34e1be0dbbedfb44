"""Writes a model in Megatron-LM's format, for any layout. One process writes one tensor at a time."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megappo.checkpoint.storage import storage_writer
from megappo.checkpoint.torch_dist.common import COMMON, RENAMED, megatron_arguments
from megappo.checkpoint.torch_dist.folder import FORMAT, FORMAT_FILE, RELEASE, TRACKER
from megappo.checkpoint.torch_dist.places import OUTPUT_BIAS, StoredPlace, written_places
from megappo.errors import writing
from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import OUTPUT_LAYER, Parameter, model_parameters, shard_shape
from megappo.families.weights import WeightSource, read_shard
from megappo.files.json_values import JSONValue
from megappo.files.plain_files import synced

_CHECKPOINT_VERSION = 3.0  # version of Megatron-LM since 2020


@dataclass(frozen=True)
class _Part:
    """Content of a place. Reading is deferred until the write."""

    place: StoredPlace
    read: Callable[[], Tensor]

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.place.key, self.chunk.offsets)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        index, shape = self.place.index, self.place.shape
        return ChunkStorageMetadata(
            torch.Size([*index, *(0 for _ in shape)]), torch.Size([*(1 for _ in index), *shape])
        )

    def tensor(self, dtype: torch.dtype) -> Tensor:
        return self.read().to(dtype).reshape(self.chunk.sizes)


class _OneByOne(DefaultSavePlanner):
    """Planner that reads each tensor at the time of the write, and writes empty objects that Megatron-Core expects."""

    def __init__(self, parts: list[_Part], dtype: torch.dtype) -> None:
        super().__init__()
        self._parts, self._dtype = {part.index: part for part in parts}, dtype

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """See `DefaultSavePlanner`."""
        if write_item.type == WriteItemType.BYTE_IO:
            content = BytesIO()
            torch.save([None], content)
            return content
        return self._parts[write_item.index].tensor(self._dtype)


def write_torch_dist(
    out: Path, arch: ArchitectureConfig, source: WeightSource, dtype: torch.dtype, *, role: str, step: int
) -> None:
    """Write weights without an optimizer (a release in Megatron-LM).

    A critic's head is the output layer, with one row and a bias. The file with the newest iteration is written last.
    """
    folder = out / RELEASE
    folder.mkdir(parents=True)
    _write_tensors(folder, list(_parts(arch, source, role)), dtype)
    content = {
        "args": Namespace(**_arguments(arch, role)),
        "checkpoint_version": _CHECKPOINT_VERSION,
        "iteration": step,
        "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": False},
    }
    with synced(folder / COMMON) as file:
        torch.save(content, file)
    with writing(out):
        (folder / FORMAT_FILE).write_text(json.dumps(FORMAT))
        (out / TRACKER).write_text(RELEASE)


def _parts(arch: ArchitectureConfig, source: WeightSource, role: str) -> Iterator[_Part]:
    for parameter in model_parameters(arch):
        if role != "critic" or parameter.megatron != OUTPUT_LAYER:
            for place in written_places(arch, parameter):
                yield _Part(place, partial(_whole, arch, source, parameter))
    head = source.value_head() if role == "critic" else None
    if head is not None:
        for key, tensor in zip((OUTPUT_LAYER, OUTPUT_BIAS), head, strict=True):
            yield _Part(StoredPlace(key, tuple(tensor.shape)), tensor.clone)


def _whole(arch: ArchitectureConfig, source: WeightSource, parameter: Parameter) -> Tensor:
    """Return a parameter without tensor parallelism and padding."""
    like = torch.empty(shard_shape(arch, parameter, 1, arch.vocab_size), device="meta")
    return read_shard(source, arch, parameter, like, 0, 1, arch.vocab_size)


def _extra_state(place: StoredPlace) -> Iterator[str]:
    """Yield the name of the extra state of a linear layer or norm, in the format of Megatron-Core's `ShardedObject`.
    The extra state is for float8, but Megatron-Core always expects the object."""
    module, _, last = place.key.rpartition(".")
    if last == "weight" and not module.endswith(("word_embeddings", "output_layer", "router")):
        index, counts = (".".join(map(str, of)) for of in (place.index or (0,), place.counts or (1,)))
        yield f"{module}._extra_state/shard_{index}_{counts}"


def _write_tensors(folder: Path, parts: list[_Part], dtype: torch.dtype) -> None:
    """Write tensors with torch's writer, the base of Megatron-Core's writer."""
    properties = TensorProperties(dtype=dtype)
    stored = {p.place.key: TensorStorageMetadata(properties, torch.Size(p.place.size), []) for p in parts}
    objects = [key for part in parts for key in _extra_state(part.place)]
    items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in objects]
    for part in parts:
        entry = stored[part.place.key]
        entry.chunks.append(part.chunk)
        data = TensorWriteData(part.chunk, properties, entry.size)
        items.append(WriteItem(part.index, WriteItemType.SHARD, tensor_data=data))
    writer = storage_writer(folder)
    writer.set_up_storage_writer(True)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(items))])
    results = writer.write_data(plan, _OneByOne(parts, dtype)).wait()
    writer.finish(Metadata({**stored, **dict.fromkeys(objects, BytesStorageMetadata())}), [results])


def _arguments(arch: ArchitectureConfig, role: str) -> dict[str, JSONValue]:
    """Return arguments for Megatron-LM's --use-checkpoint-args, and for the checks at loading."""
    arguments = megatron_arguments(arch)
    if role == "critic":
        arguments["untie_embeddings_and_output_weights"] = True
    return {
        **arguments,
        **{new: arguments[old] for old, new in RENAMED.items()},
        "max_position_embeddings": arch.max_position_embeddings,
        "seq_length": arch.max_position_embeddings,
        "padded_vocab_size": arch.vocab_size,
        "vocab_size": arch.vocab_size,
        "make_vocab_size_divisible_by": 1,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "no_save_optim": True,
        "no_save_rng": True,
        "ckpt_format": FORMAT["sharded_backend"],
    }
