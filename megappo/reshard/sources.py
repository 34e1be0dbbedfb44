"""Where weights come from: safetensors of which only the needed slices are read, or a seed."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megappo.architecture import ArchitectureConfig
from megappo.reshard.hf_map import Parameter, Piece, assemble_shard, hf_shape, model_parameters, pieces


class WeightSource(Protocol):
    """Gives slices of Hugging Face tensors."""

    def read(self, piece: Piece) -> Tensor:
        """The slice, on the CPU."""
        ...


class SafetensorsSource:
    """The safetensors of a Hugging Face folder; tensors of other ranks are never read.

    Raises ValueError where the folder holds no safetensors or damaged ones, or a tensor is missing or has another
    shape.
    """

    def __init__(self, folder: Path, arch: ArchitectureConfig) -> None:
        self._folder, self._arch = folder, arch
        self._open: dict[str, Any] = {}
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.exists():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif single.exists():
            self._file_of = dict.fromkeys(self._opened(single.name).keys(), single.name)
        else:
            raise ValueError(
                f"{folder} holds no model.safetensors; save the model as safetensors, or use model.init: random"
            )

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self._folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{self._folder / file} cannot be read ({error}); it may be cut short: fetch or save it again"
                ) from error
        return self._open[file]

    def _find(self, name: str) -> str:
        # A token classifier or bare trunk stores the same tensors without the "model." in front.
        for candidate in (name, name.removeprefix("model.")):
            if candidate in self._file_of:
                return candidate
        raise ValueError(f"{self._folder} has no tensor '{name}'; the weights do not fit its config.json")

    def _slice(self, tensor_name: str) -> Any:
        """A tensor that is there in the shape that config.json gives it; nothing of it is read yet."""
        name = self._find(tensor_name)
        tensor = self._opened(self._file_of[name]).get_slice(name)
        expected = hf_shape(self._arch, tensor_name)
        if tuple(tensor.get_shape()) != expected:
            raise ValueError(
                f"tensor '{name}' in {self._folder} has shape {tuple(tensor.get_shape())}, its config.json says "
                f"{expected}; the weights do not fit the configuration"
            )
        return tensor

    def check(self, *, with_output_layer: bool) -> int:
        """Look for every tensor of the model, by the files' headers; returns their number."""
        names = [name for parameter in model_parameters(self._arch) for name in parameter.hf]
        wanted = [name for name in names if with_output_layer or name != "lm_head.weight"]
        for name in wanted:
            self._slice(name)
        return len(wanted)

    def read(self, piece: Piece) -> Tensor:
        """The slice, on the CPU, in the type it is stored in."""
        tensor = self._slice(piece.name)
        if piece.dim == 0:
            return tensor[piece.start : piece.stop]
        return tensor[:, piece.start : piece.stop]


class RandomSource:
    """Weights drawn from a seed and the tensor's name alone, so every layout starts from the same model."""

    def __init__(self, arch: ArchitectureConfig, seed: int) -> None:
        self._arch, self._seed = arch, seed
        # The slices of one parameter come from at most three tensors (query, key, value).
        self._whole = lru_cache(maxsize=3)(self._draw)

    def _draw(self, name: str) -> Tensor:
        """A normal(0, initializer_range) matrix, a norm of ones or a bias of zeros."""
        shape = hf_shape(self._arch, name)
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith(".bias"):
            return torch.zeros(shape)
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.randn(shape, generator=generator) * self._arch.initializer_range

    def read(self, piece: Piece) -> Tensor:
        """The slice, on the CPU, in float32."""
        return self._whole(piece.name).narrow(piece.dim, piece.start, piece.size)


def read_shard(
    source: WeightSource,
    arch: ArchitectureConfig,
    parameter: Parameter,
    like: Tensor,
    tensor_rank: int,
    tp: int,
    padded_vocab: int,
) -> Tensor:
    """This rank's shard of a parameter in the shape and type of `like`, on the CPU."""
    shard_pieces = pieces(arch, parameter, tensor_rank, tp, padded_vocab)
    shard = assemble_shard([source.read(p) for p in shard_pieces], shard_pieces, like.shape)
    assert shard.shape == like.shape, f"{parameter.megatron}: {tuple(shard.shape)} for {tuple(like.shape)}"
    return shard.to(like.dtype)
