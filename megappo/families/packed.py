"""Conversion between tensors of single experts and packed tensors, which contain all experts of a layer.

Files of some families store packed tensors; see `Weight.interleaved`. The parameter map, checkpoints and weight
streams have one tensor per expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megappo.families.declaration import ArchitectureConfig, Shape
from megappo.families.parameters import Parameter, model_parameters, tensor_shapes


class PackedPart(NamedTuple):
    """Position of an expert's tensor within a packed tensor."""

    name: str
    """Name of the packed tensor."""
    expert: int
    turn: int
    turns: int
    """Number of tensors with alternating outputs in the expert's matrix. This tensor has the outputs `turn`, `turn +
    turns`, ..."""

    def of(self, own: Tensor) -> Tensor:
        """Return the view of this tensor in the expert's part of the packed tensor: (inputs, outputs) or (outputs,)
        -> (rows, columns) or (rows,)."""
        return own.t()[self.turn :: self.turns]


def packed_parts(arch: ArchitectureConfig) -> dict[str, PackedPart]:
    """Return the positions of all tensors that files store in packed tensors, by their names in the map."""
    return {
        name: PackedPart(parameter.packed, parameter.expert, turn, len(parameter.hf))
        for parameter in model_parameters(arch)
        if parameter.interleaved and parameter.expert is not None
        for turn, name in enumerate(parameter.hf)
    }


def stored_shapes(arch: ArchitectureConfig, *, output_layer: bool = True) -> dict[str, Shape]:
    """Return the shapes of all tensors in files by name. `tensor_shapes` returns the shapes in the map."""
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
    """Convert tensors of the map to the names and shapes in files. Packed tensors are assembled on the CPU.

    A packed tensor is yielded as soon as all of its parts have been received. A tensor with an unexpected shape is
    yielded unchanged.
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
