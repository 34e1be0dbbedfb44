"""Converts between files in which the experts of a layer are one tensor and the tensors of each expert.

The map, checkpoints and streams have a tensor for each expert; see `Weight.interleaved`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megappo.families.architecture import ArchitectureConfig
from megappo.families.declaration import Shape
from megappo.families.parameters import Parameter, model_parameters, tensor_shapes


class PackedPart(NamedTuple):
    """Place of an expert's tensor within the packed tensor of a file."""

    name: str
    """Name of the tensor that holds those of all experts."""
    expert: int
    turn: int
    turns: int
    """Number of tensors whose outputs alternate in the expert's matrix; this one has the outputs `turn`, `turn +
    turns`, ..."""

    def of(self, own: Tensor) -> Tensor:
        """View of the tensor in the expert's part of the file: (inputs, outputs), or (outputs,) -> (rows, columns), or
        (rows,)."""
        return own.t()[self.turn :: self.turns]


def packed_parts(arch: ArchitectureConfig) -> dict[str, PackedPart]:
    """Places of all tensors that have no name of their own in files, by their names in the map."""
    return {
        name: PackedPart(parameter.packed, parameter.expert, turn, len(parameter.hf))
        for parameter in model_parameters(arch)
        if parameter.interleaved and parameter.expert is not None
        for turn, name in enumerate(parameter.hf)
    }


def stored_shapes(arch: ArchitectureConfig, *, output_layer: bool = True) -> dict[str, Shape]:
    """Shapes of all tensors in files by their names, as `tensor_shapes` gives those of the map."""
    whole = tensor_shapes(arch, output_layer=output_layer)
    for parameter in model_parameters(arch):
        if parameter.interleaved:
            for name in parameter.hf:
                del whole[name]
            whole[parameter.packed] = _packed_shape(arch, parameter)
    return whole


def _packed_shape(arch: ArchitectureConfig, parameter: Parameter) -> Shape:
    rows, *columns = parameter.shapes[0]
    return (arch.experts, *columns, rows * len(parameter.shapes))


def packed_tensors(arch: ArchitectureConfig, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors with the names and shapes that they have in files, on the CPU where several make one.

    A packed tensor is yielded when all of its parts have arrived. A tensor of an unexpected shape is yielded unchanged.
    """
    parts, shapes = packed_parts(arch), tensor_shapes(arch) if arch.experts else {}
    whole_shapes = stored_shapes(arch) if parts else {}
    begun: dict[str, Tensor] = {}
    missing: dict[str, set[tuple[int, int]]] = {}
    for name, tensor in tensors:
        part = parts.get(name)
        if part is None or tuple(tensor.shape) != shapes[name]:
            yield name, tensor
            continue
        if part.name not in begun:
            begun[part.name] = torch.empty(whole_shapes[part.name], dtype=tensor.dtype)
            missing[part.name] = {(expert, turn) for expert in range(arch.experts) for turn in range(part.turns)}
        part.of(begun[part.name][part.expert]).copy_(tensor)
        missing[part.name].discard((part.expert, part.turn))
        if not missing[part.name]:
            yield part.name, begun.pop(part.name)
