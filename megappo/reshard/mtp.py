"""Multi-token prediction layers (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).

Engines draft tokens with these layers. No role computes the layers, so no model, checkpoint or weight stream contains
their weights. The weights remain in the model folder of the policy and are read for the export of a policy. A
checkpoint contains a checksum of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import Piece, wide_tensors
from megappo.reshard.sources import SafetensorsSource


@dataclass(frozen=True)
class MTPLayers:
    """Multi-token prediction layers of a model. Tensors are read on request."""

    arch: ArchitectureConfig
    source: SafetensorsSource | None = None
    """Open files with the layers, which remain readable if their folder is deleted. None if the model has no such
    layers."""

    @property
    def names(self) -> tuple[str, ...]:
        """Sorted names of all tensors of the layers."""
        return () if self.source is None else tuple(sorted(self.source.mtp_shapes))

    def tensors(self, share: tuple[int, int] = (0, 1)) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in files, tensor) on the CPU in the stored type, float8 as float32. `share` is (k, n) for every
        n-th tensor, starting with the k-th."""
        first, step = share
        for name in self.names[first::step]:
            assert self.source is not None
            yield name, self.source.read(Piece(name, 0, 0, self.source.mtp_shapes[name][0]))

    def exported(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in the type of an export: float32 if the model's own layers use float32, otherwise
        `dtype`."""
        wide = {_in_layer(name) for name in wide_tensors(self.arch)}
        for name, tensor in self.tensors():
            yield name, tensor.to(torch.float32 if _in_layer(name) in wide else dtype)


def _in_layer(name: str) -> str:
    """`model.layers.61.mlp.gate.weight` and `mtp.layers.0.mlp.gate.weight` -> `mlp.gate.weight`; other names are
    unchanged."""
    parts = name.split(".", 3)
    return parts[3] if len(parts) == 4 and parts[1] == "layers" else name


def mtp_layers_in(folder: Path, arch: ArchitectureConfig) -> MTPLayers:
    """Return the multi-token prediction layers of the model in a folder. Raises ValueError as `SafetensorsSource`."""
    source = SafetensorsSource(folder, arch)
    source.check_mtp_types()
    return MTPLayers(arch, source)
