"""Fingerprints of an SGLang engine's parameters, computed from Hugging Face tensors, to prove that what arrived is what
was sent.

SGLang keeps query, key and value in one parameter, gate and up projections in another and a rank's experts of a layer
in two, shards rows or columns over its tensor parallel ranks and pads the vocabulary. `/weights_checker` answers with a
checksum of each parameter on each of its ranks; the same numbers are computed here without building those parameters.
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
    """The slices whose concatenation is the engine's parameter on one of its ranks. `sliced`: the tensors are that
    rank's part already."""
    for piece in shape.pieces(parameter, rank):
        tensor = tensors[piece.name]
        last = tensor if sliced else tensor.narrow(piece.dim, piece.start, piece.size)
        yield last
    if rows := shape.padding(parameter, rank):
        yield last.new_zeros(rows, *last.shape[1:])


def fingerprint(shards: Iterable[Tensor]) -> str:
    """The checksum that SGLang gives a parameter with this content (sglang/srt/managers/mm_utils.py:899 in 0.5.23)."""
    tensors = list(shards)
    if tensors[0].is_cuda:
        from megappo_kernels.gpu.checksum import tensor_checksum  # where Triton is

        return f"{tensor_checksum(torch.cat([t.contiguous() for t in tensors])):016x}"
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()[:8].hex()


class Fingerprints:
    """Checksums of one sync, bucket after bucket.

    Experts of a layer may come in several buckets, but make one parameter of the engine. Copies of them are kept until
    the others arrive, so that up to the experts of one layer are in memory beyond the buckets.
    """

    def __init__(self, shape: EngineShape, rank: int | None = None) -> None:
        """`rank`: the engine's rank whose slices are given; None: whole tensors are given, from which those of all
        ranks follow."""
        self._shape, self._sliced = shape, rank is not None
        self._ranks: Sequence[int] = range(shape.tp) if rank is None else (rank,)
        self._waiting: dict[tuple[int, str], dict[int, list[Tensor]]] = {}

    def of_bucket(self, parameters: Iterable[Parameter], tensors: Mapping[str, Tensor]) -> dict[tuple[int, str], str]:
        """Checksums of every engine parameter that is complete with a bucket, by (engine rank, engine name)."""
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
    """Names of the parameters that differ from what was sent, did not arrive, or that only the engine has."""
    wrong = {name for (rank, name), value in expected.items() if actual.get((rank, name)) != value}
    return sorted(wrong | {name for key in actual.keys() - expected.keys() for name in [key[1]]})
