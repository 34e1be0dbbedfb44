"""What arrived is what was sent: fingerprints of an SGLang engine's parameters, computed from Hugging Face tensors.

SGLang keeps query, key and value in one parameter, gate and up projections in another and a rank's experts of a layer
in two, shards rows or columns over its tensor parallel ranks and pads the vocabulary. `/weights_checker` answers with a
checksum of each parameter on each of its ranks; the same numbers are computed here without building those parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.families.architecture import ArchitectureConfig, padded_vocab_size
from megappo.families.parameters import Parameter

_VOCAB_MULTIPLE = 64  # sglang/srt/layers/vocab_parallel_embedding.py:48


@dataclass(frozen=True)
class EngineShape:
    """How an engine holds a model."""

    arch: ArchitectureConfig
    tp: int
    ep: int = 1
    """Groups of ranks that hold whole experts; the first tp / ep ranks are the first group."""

    def of_experts(self, rank: int) -> tuple[range, EngineShape, int]:
        """The experts that are on a rank, how its group holds each of them, and its place in the group."""
        held, ranks = self.arch.experts // self.ep, self.tp // self.ep
        group, place = divmod(rank, ranks)
        return range(group * held, (group + 1) * held), EngineShape(self.arch, ranks), place

    @property
    def padded_vocab(self) -> int:
        """Rows of its embedding over all ranks."""
        rows = padded_vocab_size(self.arch.vocab_size, self.tp, _VOCAB_MULTIPLE)
        return padded_vocab_size(rows, self.tp, _VOCAB_MULTIPLE * self.tp) if rows % self.tp else rows


def engine_shards(shape: EngineShape, parameter: Parameter, whole: Mapping[str, Tensor], rank: int) -> Iterator[Tensor]:
    """What stands, one after another, in the engine's parameter on one of the tensor parallel ranks that share it out;
    of an expert, those are its group's."""
    tensors = [whole[name] for name in parameter.hf]
    if parameter.kind == "row":
        width = tensors[0].shape[1] // shape.tp
        yield tensors[0][:, rank * width : (rank + 1) * width]
    elif parameter.kind == "vocab":
        rows = shape.padded_vocab // shape.tp
        part = tensors[0][rank * rows : (rank + 1) * rows]
        yield part
        if len(part) < rows:
            yield part.new_zeros(rows - len(part), *part.shape[1:])
    elif parameter.kind == "qkv":
        yield from _attention_shards(shape, tensors, rank)
    elif parameter.kind == "column":
        for tensor in tensors:
            rows = len(tensor) // shape.tp
            yield tensor[rank * rows : (rank + 1) * rows]
    else:
        yield tensors[0]


def _attention_shards(shape: EngineShape, tensors: list[Tensor], rank: int) -> Iterator[Tensor]:
    """Queries are shared out; keys and values too, or repeated where there are fewer heads than ranks."""
    rows = len(tensors[0]) // shape.tp
    yield tensors[0][rank * rows : (rank + 1) * rows]
    heads = max(1, shape.arch.kv_heads // shape.tp)
    first = rank * shape.arch.kv_heads // shape.tp
    for tensor in tensors[1:]:
        yield tensor[first * shape.arch.head_dim : (first + heads) * shape.arch.head_dim]


def fingerprint(shards: Iterable[Tensor]) -> str:
    """The checksum that SGLang gives a parameter with this content (sglang/srt/managers/mm_utils.py:899)."""
    tensors = list(shards)
    if tensors[0].is_cuda:
        from sglang.srt.managers.mm_utils import tensor_hash

        return f"{tensor_hash(torch.cat([t.contiguous() for t in tensors])):016x}"
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()[:8].hex()


class Fingerprints:
    """Checksums of one sync, bucket after bucket.

    Experts of a layer may come in several buckets, but make one parameter: copies of them wait here for the others, so
    beyond the buckets it holds up to the experts of one layer.
    """

    def __init__(self, shape: EngineShape) -> None:
        self._shape = shape
        self._waiting: dict[tuple[int, str], dict[int, list[Tensor]]] = {}

    def of_bucket(self, parameters: Iterable[Parameter], whole: Mapping[str, Tensor]) -> dict[tuple[int, str], str]:
        """Checksums of every engine parameter that is complete with a bucket, by (engine rank, engine name)."""
        found: dict[tuple[int, str], str] = {}
        for parameter in parameters:
            name = parameter.engine_name
            for rank in range(self._shape.tp):
                if parameter.expert is not None:
                    found |= self._of_experts(parameter, whole, (rank, name))
                elif parameter.kind == "replicated" and rank > 0:
                    found[rank, name] = found[0, name]
                else:
                    found[rank, name] = fingerprint(engine_shards(self._shape, parameter, whole, rank))
        return found

    def _of_experts(
        self, parameter: Parameter, whole: Mapping[str, Tensor], key: tuple[int, str]
    ) -> dict[tuple[int, str], str]:
        held, shape, rank = self._shape.of_experts(key[0])
        if parameter.expert is None or parameter.expert not in held:
            return {}
        waiting = self._waiting.setdefault(key, {})
        waiting[parameter.expert] = [s.clone() for s in engine_shards(shape, parameter, whole, rank)]
        if len(waiting) < len(held):
            return {}
        del self._waiting[key]
        return {key: fingerprint(shard for expert in sorted(waiting) for shard in waiting[expert])}


def differing(expected: Mapping[tuple[int, str], str], actual: Mapping[tuple[int, str], str]) -> list[str]:
    """Names of the parameters that are not what was sent, that did not come, or that the engine has besides."""
    wrong = {name for (rank, name), value in expected.items() if actual.get((rank, name)) != value}
    return sorted(wrong | {name for key in actual.keys() - expected.keys() for name in [key[1]]})
