"""A role's weights in a checkpoint as the Hugging Face tensors they make, one at a time, read by one process.

What an export writes, and what another run starts from on any layout.
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

from megappo.architecture import ArchitectureConfig
from megappo.checkpoint.files import DamagedError
from megappo.checkpoint.reader import ShardReader, read_metadata
from megappo.checkpoint.shards import VALUE_HEAD, stored_names
from megappo.errors import RunError
from megappo.reshard.hf_map import OUTPUT_LAYER, Piece, hf_shape, model_parameters
from megappo.reshard.value_heads import ValueHeadWeights


class CheckpointSource:
    """The actor or critic of a whole checkpoint.

    Raises ValueError where the checkpoint has no such role, or its tensors are not those of the architecture.
    """

    def __init__(self, folder: Path, role: str, arch: ArchitectureConfig) -> None:
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
            raise ValueError(f"{folder} holds no {role}; its run trained none")
        self._parameters = [p for p in model_parameters(arch) if role != "critic" or p.megatron != OUTPUT_LAYER]
        self._stored = {hf: (name, p.kind) for p in self._parameters for name, hf in stored_names(p)}
        self._parts: dict[str, list[str]] = {}
        for hf, (name, _) in self._stored.items():
            self._parts.setdefault(name, []).append(hf)
        wanted = self._parts.keys() | set(VALUE_HEAD if role == "critic" else ())
        if wanted != self._sizes.keys():
            strange = sorted(wanted ^ self._sizes.keys())
            raise ValueError(
                f"the {role} in {folder} is of another architecture than config.json says: "
                f"{', '.join(strange[:3])} {'is' if len(strange) == 1 else 'are'} in only one of them"
            )
        self._last: tuple[str, dict[str, Tensor]] = ("", {})
        """The stored tensor that was read last, as the Hugging Face tensors in it: they are asked for, slice by slice,
        one after another."""

    def _load(self, name: str) -> Tensor:
        """A stored tensor, whole, in float32."""
        state = {self._prefix + name: torch.empty(self._sizes[name], dtype=torch.float32)}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is what is meant
                dcp.load(state, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            reason = " ".join(str(error).split())[:300]
            raise RunError(f"{self._folder} cannot be read; the run may have deleted it meanwhile: {reason}") from error
        return state[self._prefix + name]

    def _tensor(self, name: str) -> Tensor:
        """A Hugging Face tensor."""
        stored, kind = self._stored[name]
        if self._last[0] != stored:
            self._last = ("", {})  # frees it before the next one is read
            whole = self._load(stored)
            self._last = (stored, {part: self._part(part, kind, whole) for part in self._parts[stored]})
        return self._last[1][name]

    def _part(self, name: str, kind: str, whole: Tensor) -> Tensor:
        """A Hugging Face tensor of the stored one that holds it."""
        arch = self._arch
        if kind == "qkv" and whole.shape[0] == (arch.heads + 2 * arch.kv_heads) * arch.head_dim:
            # By key/value group: its queries, its key, its value.
            queries = arch.heads // arch.kv_heads
            groups = whole.unflatten(0, (arch.kv_heads, queries + 2, arch.head_dim))
            first = {"q_proj": 0, "k_proj": queries, "v_proj": queries + 1}[name.split(".")[-2]]
            whole = groups[:, first : queries if first == 0 else first + 1].flatten(0, 2)
        if kind == "vocab":
            whole = whole[: arch.vocab_size]  # rows of padding come after
        expected = hf_shape(arch, name)
        if whole.shape != expected:
            raise ValueError(
                f"tensor '{name}' in {self._folder} has shape {tuple(whole.shape)}, config.json says {expected}; "
                "the checkpoint is of another model"
            )
        return whole

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the trunk, and an actor's output layer, in Hugging Face's order and float32."""
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
