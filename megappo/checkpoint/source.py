"""Weights of a role in a checkpoint as Hugging Face tensors. One process reads one tensor at a time.

Exports use this module, and runs that start from a checkpoint of another run with any layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megappo.checkpoint.files import DamagedError
from megappo.checkpoint.reader import ShardReader, read_metadata
from megappo.checkpoint.shards import VALUE_HEAD
from megappo.errors import RunError, first_of, reason
from megappo.families.adapters import LoraShape, adapter_parameters
from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import OUTPUT_LAYER, Parameter, Piece, model_parameters, pieces
from megappo.families.weights import ValueHeadWeights, scatter_shard


class CheckpointSource:
    """Source of the weights or adapters of an actor or critic in a whole checkpoint.

    Raises ValueError if the checkpoint does not contain the role, or if the tensors do not fit the architecture.
    """

    def __init__(self, folder: Path, role: str, arch: ArchitectureConfig, lora: LoraShape | None = None) -> None:
        self._folder, self._arch, self._prefix = folder, arch, f"{role}.weight."
        try:
            metadata = read_metadata(folder)
        except DamagedError as error:
            raise ValueError(f"the checkpoint {folder} is damaged: {error}") from error
        self._reader = ShardReader(folder, metadata)
        self._sizes = {
            key.removeprefix(self._prefix): entry.size
            for key, entry in metadata.state_dict_metadata.items()
            if key.startswith(self._prefix) and isinstance(entry, TensorStorageMetadata)
        }
        if not self._sizes:
            raise ValueError(f"{folder} contains no {role}, because the run trained none")
        parameters = model_parameters(arch) if lora is None else adapter_parameters(arch, lora)
        self._parameters = [p for p in parameters if role != "critic" or p.megatron != OUTPUT_LAYER]
        self._stored = {hf: (name, p) for p in self._parameters for name, parts in p.stored.items() for hf in parts}
        expected = {name for name, _ in self._stored.values()} | set(VALUE_HEAD if role == "critic" else ())
        if expected != self._sizes.keys():
            strange = sorted(expected ^ self._sizes.keys())
            raise ValueError(
                f"the architecture of the {role} in {folder} differs from config.json: "
                f"{first_of(strange, 3)} {'is' if len(strange) == 1 else 'are'} in only one of them"
            )
        self._last: tuple[str, dict[str, Tensor]] = ("", {})
        """Last stored tensor as its Hugging Face tensors. The cache serves consecutive reads of slices."""

    def _load(self, name: str) -> Tensor:
        """Load a whole stored tensor in float32."""
        state = {self._prefix + name: torch.empty(self._sizes[name], dtype=torch.float32)}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process reads
                dcp.load(state, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            raise RunError(
                f"{self._folder} cannot be read; the run may have deleted the checkpoint: {reason(error)}"
            ) from error
        return state[self._prefix + name]

    def _tensor(self, name: str) -> Tensor:
        """Load a whole Hugging Face tensor in float32."""
        stored, parameter = self._stored[name]
        if self._last[0] != stored:
            self._last = ("", {})  # frees the tensor before the next read
            self._last = (stored, self._parts(stored, parameter))
        return self._last[1][name]

    def _parts(self, stored: str, parameter: Parameter) -> dict[str, Tensor]:
        """Load the Hugging Face tensors of a stored tensor."""
        shapes = {name: parameter.tensors[name] for name in parameter.stored[stored]}
        (first, shape), rows = next(iter(shapes.items())), sum(shape[0] for shape in shapes.values())
        whole = self._load(stored)
        if parameter.kind == "vocab":
            whole = whole[:rows]  # the rest is padding
        if whole.shape != (rows, *shape[1:]):
            raise ValueError(
                f"tensor '{first}' in {self._folder} has shape {tuple(whole.shape)}, but config.json requires "
                f"{(rows, *shape[1:])}; the checkpoint is of another model"
            )
        if len(shapes) == 1 and parameter.kind != "grouped":
            return {first: whole}
        tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
        scatter_shard(whole, pieces(self._arch, parameter, 0, 1, rows), tensors)
        return tensors

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the trunk and an actor's output layer, or the tensors of all adapters. The tensors are
        in Hugging Face's order and float32."""
        for parameter in self._parameters:
            for name in parameter.hf:
                yield name, self._tensor(name)

    def read(self, piece: Piece) -> Tensor:
        """See `WeightSource`."""
        return self._tensor(piece.name).narrow(piece.dim, piece.start, piece.size)

    def value_head(self) -> ValueHeadWeights | None:
        """See `WeightSource`."""
        if not set(VALUE_HEAD) <= self._sizes.keys():
            return None
        return ValueHeadWeights(*(self._load(name) for name in VALUE_HEAD))
