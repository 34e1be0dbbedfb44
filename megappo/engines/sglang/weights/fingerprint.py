"""Fingerprints of the parameters of an SGLang engine, computed from Hugging Face tensors. The fingerprints verify
that the received weights equal the sent weights.

SGLang stores query, key and value in one parameter, gate and up projections in another parameter, and the experts of
a layer on a rank in two parameters. SGLang also shards rows or columns over tensor-parallel ranks and pads the
vocabulary. `/weights_checker` returns a checksum of each parameter on each rank. This module computes the same
checksums without building the parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megappo.families.parameters import Parameter
from megappo.reshard.slices import EngineShape


def engine_shards(
    shape: EngineShape, parameter: Parameter, tensors: Mapping[str, Tensor], rank: int, *, sliced: bool = False
) -> Iterator[Tensor]:
    """Yield the slices whose concatenation is the parameter of the engine on one of its ranks. With `sliced`, the
    tensors are already the part of this rank."""
    for piece in shape.pieces(parameter, rank):
        tensor = tensors[piece.name]
        last = tensor if sliced else tensor.narrow(piece.dim, piece.start, piece.size)
        yield last
    if rows := shape.padding(parameter, rank):
        yield last.new_zeros(rows, *last.shape[1:])


def fingerprint(shards: Iterable[Tensor]) -> str:
    """Return the checksum that SGLang computes for a parameter with this content (sglang/srt/managers/mm_utils.py:899
    in 0.5.23)."""
    tensors = list(shards)
    if tensors[0].is_cuda:
        from megappo_kernels.gpu.checksum import tensor_checksum  # requires Triton

        return f"{tensor_checksum(torch.cat([t.contiguous() for t in tensors])):016x}"
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()[:8].hex()


class Fingerprints:
    """Checksums of one sync, computed bucket by bucket.

    Experts of a layer may arrive in several buckets, but form one parameter of the engine. Copies of the experts are
    stored until all experts of the parameter have arrived. Memory use beyond the buckets is therefore up to the
    experts of one layer.
    """

    def __init__(self, shape: EngineShape, rank: int | None = None) -> None:
        """Create empty fingerprints.

        `rank` is the rank of the engine whose slices arrive. With None, whole tensors arrive, and checksums of all
        ranks are computed.
        """
        self._shape, self._sliced = shape, rank is not None
        self._ranks: Sequence[int] = range(shape.tp) if rank is None else (rank,)
        self._waiting: dict[tuple[int, str], dict[int, list[Tensor]]] = {}

    def of_bucket(self, parameters: Iterable[Parameter], tensors: Mapping[str, Tensor]) -> dict[tuple[int, str], str]:
        """Return the checksums of all engine parameters that this bucket completes, by (engine rank, engine name)."""
        found: dict[tuple[int, str], str] = {}
        for parameter in parameters:
            name = parameter.engine_name
            for rank in self._ranks:
                if parameter.expert is not None:
                    found |= self._of_experts(parameter, tensors, (rank, name))
                elif parameter.kind == "replicated" and rank != self._ranks[0]:
                    found[rank, name] = found[self._ranks[0], name]
                else:
                    shards = engine_shards(self._shape, parameter, tensors, rank, sliced=self._sliced)
                    found[rank, name] = fingerprint(shards)
        return found

    def _of_experts(
        self, parameter: Parameter, tensors: Mapping[str, Tensor], key: tuple[int, str]
    ) -> dict[tuple[int, str], str]:
        held, shape, rank = self._shape.of_experts(key[0])
        if parameter.expert is None or parameter.expert not in held:
            return {}
        waiting = self._waiting.setdefault(key, {})
        waiting[parameter.expert] = [
            s.clone() for s in engine_shards(shape, parameter, tensors, rank, sliced=self._sliced)
        ]
        if len(waiting) < len(held):
            return {}
        del self._waiting[key]
        return {key: fingerprint(shard for expert in sorted(waiting) for shard in waiting[expert])}


def differing(expected: Mapping[tuple[int, str], str], actual: Mapping[tuple[int, str], str]) -> list[str]:
    """Return the names of parameters that differ from the sent parameters, did not arrive, or exist only in the
    engine."""
    wrong = {name for (rank, name), value in expected.items() if actual.get((rank, name)) != value}
    return sorted(wrong | {name for key in actual.keys() - expected.keys() for name in [key[1]]})
