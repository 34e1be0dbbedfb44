"""Layers that predict further tokens (multi-token prediction, DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).

Engines draft tokens with them. No role computes them, so they are in no model, checkpoint or weight stream: their
weights stay in the folder of the policy's model, of which they are read when a policy is exported. A checkpoint holds
their checksum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megappo.families.architecture import ArchitectureConfig
from megappo.families.parameters import Piece, wide_tensors
from megappo.reshard.sources import SafetensorsSource


@dataclass(frozen=True)
class MTPLayers:
    """Multi-token prediction layers of a model, which are read only when they are asked for."""

    arch: ArchitectureConfig
    source: SafetensorsSource | None = None
    """Open files that hold the layers, so that they can be read when their folder is gone; None: the model has none."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors of the layers, in order."""
        return () if self.source is None else tuple(sorted(self.source.mtp_shapes))

    def tensors(self, share: tuple[int, int] = (0, 1)) -> Iterator[tuple[str, Tensor]]:
        """(name in files, tensor) on the CPU in the type it is stored in, float8 as float32. `share`: (k, n) for every
        n-th of them, from the k-th on."""
        first, step = share
        for name in self.names[first::step]:
            assert self.source is not None
            yield name, self.source.read(Piece(name, 0, 0, self.source.mtp_shapes[name][0]))

    def exported(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The tensors in the type of an export: float32 where the model's own layers have float32, otherwise
        `dtype`."""
        wide = {_in_layer(name) for name in wide_tensors(self.arch)}
        for name, tensor in self.tensors():
            yield name, tensor.to(torch.float32 if _in_layer(name) in wide else dtype)


def _in_layer(name: str) -> str:
    """`model.layers.61.mlp.gate.weight` and `mtp.layers.0.mlp.gate.weight` -> `mlp.gate.weight`; others as they are."""
    parts = name.split(".", 3)
    return parts[3] if len(parts) == 4 and parts[1] == "layers" else name


def mtp_layers_in(folder: Path, arch: ArchitectureConfig) -> MTPLayers:
    """The multi-token prediction layers of the model in a folder. Raises ValueError as `SafetensorsSource` does."""
    source = SafetensorsSource(folder, arch)
    source.check_mtp_types()
    return MTPLayers(arch, source)
