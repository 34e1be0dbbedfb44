"""Sources of weights: safetensors, from which only the needed slices are read, or random numbers from a seed."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megappo.families.declaration import ArchitectureConfig
from megappo.families.packed import packed_parts, stored_shapes
from megappo.families.parameters import HF_EMBEDDING, HF_OUTPUT_LAYER, Piece, model_parameters, tensor_shapes
from megappo.families.weights import ValueHeadWeights
from megappo.models.weight_files import SINGLE, finite, tensor_files
from megappo.reshard.float8 import SCALE_SUFFIX, SCALE_TYPES, WEIGHT_TYPE, dequantised, scale_shape
from megappo.reshard.mxfp4 import BLOCK as MXFP4_BLOCK
from megappo.reshard.mxfp4 import SUFFIXES as MXFP4
from megappo.reshard.mxfp4 import dequantised as dequantised_mxfp4
from megappo.reshard.value_heads import EXTRA_FILE, find_value_head
from megappo.runtime.seeds import derived_seed

_PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
_COMPARED_ROWS = 8192
_FOLLOWS_FROM_CONFIG = "rotary_emb.inv_freq"
"""Name suffix of tensors in older files. The tensors are ignored, because config.json determines their values."""


class UnreadTensor(Protocol):
    """A tensor of a safetensors file that supports partial reads."""

    def get_shape(self) -> list[int]:
        """Return the sizes of the tensor."""

    def get_dtype(self) -> str:
        """Return the type of the tensor with the name of safetensors, such as `BF16`."""

    def __getitem__(self, part: slice | tuple[slice, ...]) -> Tensor:
        """Read a part."""


class SafetensorsSource:
    """The safetensors of a Hugging Face folder. Tensors of other ranks are never read.

    Blocks of float8 weights are multiplied by their scales during reading. Raises ValueError if the folder has no
    safetensors or damaged safetensors. Raises ValueError for tensors that no role of a model with its config.json
    has.
    """

    def __init__(self, folder: Path, arch: ArchitectureConfig) -> None:
        self._folder, self._arch, self._required_shapes = folder, arch, stored_shapes(arch)
        self._parts = packed_parts(arch)
        self._expert = lru_cache(maxsize=1)(self._read_expert)  # gate and up are stored in one tensor
        # With tied embeddings the files may contain the output layer too.
        self._shapes = {**self._required_shapes, HF_OUTPUT_LAYER: self._required_shapes[HF_EMBEDDING]}
        index = tensor_files(folder)
        self._file_of: dict[str, safe_open] = {}
        self._path_of: dict[str, Path] = {}
        for file in sorted(set(index.values())) or [SINGLE]:
            opened = self._opened(file)
            self._hold(file, opened, [name for name in opened.keys() if index.get(name, file) == file])  # noqa: SIM118
        if (folder / EXTRA_FILE).exists():
            opened = self._opened(EXTRA_FILE)
            self._hold(EXTRA_FILE, opened, opened.keys())
        try:
            self._head = find_value_head(self._file_of.keys(), getattr(arch.hf_config, "value_head_prefix", None))
        except ValueError as error:
            raise ValueError(f"the value head in {folder} cannot be read: {error}") from error
        self._stored = self._names()
        self.mtp_shapes = self._find_mtp_shapes()
        """Shapes of the tensors of multi-token prediction layers, by name. See `Family.mtp_layers`."""

    def _hold(self, file: str, opened: safe_open, names: Iterable[str]) -> None:
        """Store the file of these tensors."""
        for name in names:
            self._file_of[name], self._path_of[name] = opened, self._folder / file

    def _find_mtp_shapes(self) -> dict[str, tuple[int, ...]]:
        """Find the multi-token prediction layers, which are read like the tensors of the model."""
        begin = tuple(self._arch.declaration.mtp_layers(self._arch))
        named = [name for name in self._file_of if name.startswith(begin)]
        self._stored |= dict(zip(named, named, strict=True))
        scales = {name + SCALE_SUFFIX for name in named}
        shapes = {n: tuple(self._file_of[n].get_slice(n).get_shape()) for n in named if n not in scales}
        self._shapes |= shapes
        return shapes

    def of_mtp_layers(self) -> SafetensorsSource | None:
        """Return a source that has only the tensors of `mtp_shapes` and keeps no other files open. Returns None if
        there are no such tensors."""
        if not self.mtp_shapes:
            return None
        part, known = copy.copy(self), {*self.mtp_shapes, *(name + SCALE_SUFFIX for name in self.mtp_shapes)}
        part._file_of = {name: file for name, file in self._file_of.items() if name in known}
        part._expert = lru_cache(maxsize=1)(part._read_expert)
        return part

    def _opened(self, file: str) -> safe_open:
        try:
            return safe_open(self._folder / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{self._folder / file} cannot be read ({error}); it may be cut short: fetch or save it again"
            ) from error

    def _names(self) -> dict[str, str]:
        """Return the names in the files of the tensors of the model and of their scales."""
        known = {*self._shapes, *(self._head.names if self._head is not None else ())}
        if self._arch.stored_blocks is not None:
            known |= {name + SCALE_SUFFIX for name, shape in self._shapes.items() if len(shape) == 2}
        declared = self._arch.declaration
        apart = (*declared.passed_over(self._arch), *declared.mtp_layers(self._arch))
        if self._arch.stored_mxfp4:
            known |= {
                name + suffix for name, shape in self._required_shapes.items() if len(shape) == 3 for suffix in MXFP4
            }
        prefix = self._arch.declaration.stored_prefix
        names: dict[str, str] = {}
        unknown: list[str] = []
        for stored in self._file_of:
            # A token classifier or bare trunk stores the same tensors without the prefix "model.".
            called = [stored, f"model.{stored}"]
            if prefix and stored.startswith(prefix):
                called.append(f"model.{stored.removeprefix(prefix)}")
            name = next((n for n in called if n in known), None)
            if name is not None and name not in names:
                names[name] = stored
            elif not stored.endswith(_FOLLOWS_FROM_CONFIG) and not stored.startswith(apart):
                unknown.append(stored)
        if unknown:
            shown = f"{', '.join(sorted(unknown)[:3])}{' and others' if unknown[3:] else ''}"
            raise ValueError(
                f"{self._folder} contains {shown}, which a {self._arch.family} of its config.json does not have; "
                "the weights do not fit the configuration (model_type, num_hidden_layers, biases, "
                "quantization_config)"
            )
        return names

    def _slice(self, name: str) -> UnreadTensor:
        """Return an unread tensor after a check of its existence and of its shape in config.json."""
        if name not in self._stored:
            raise ValueError(f"{self._folder} has no tensor '{name}'; the weights do not fit its config.json")
        tensor = self._unread(name, self._shapes[name])
        kind = tensor.get_dtype()
        scaled, is_float8 = name + SCALE_SUFFIX in self._stored, kind == WEIGHT_TYPE
        if kind not in _PLAIN_TYPES and not (is_float8 and scaled):
            alone = "" if scaled else " without scales"
            raise ValueError(
                f"tensor '{self._stored[name]}' in {self._folder} is of type {kind}{alone}, which cannot be read; "
                f"use weights of type {', '.join(_PLAIN_TYPES)}, or float8 weights scaled in blocks"
            )
        if scaled and not is_float8:
            raise ValueError(f"tensor '{self._stored[name]}' in {self._folder} has scales, but is of type {kind}")
        return tensor

    def _unread(self, name: str, expected: tuple[int, ...]) -> UnreadTensor:
        stored = self._stored[name]
        tensor: UnreadTensor = self._file_of[stored].get_slice(stored)
        if tuple(tensor.get_shape()) != expected:
            raise ValueError(
                f"tensor '{stored}' in {self._folder} has shape {tuple(tensor.get_shape())}, but its config.json "
                f"requires {expected}; the weights do not fit the configuration"
            )
        return tensor

    def _scales(self, name: str) -> Tensor | None:
        """Return the scales of a whole float8 matrix, or None for a plain tensor."""
        blocks = self._arch.stored_blocks
        if blocks is None or name + SCALE_SUFFIX not in self._stored:
            return None
        scales = self._unread(name + SCALE_SUFFIX, scale_shape(self._shapes[name], blocks))
        if scales.get_dtype() not in SCALE_TYPES:
            raise ValueError(
                f"the scales of '{name}' in {self._folder} are of type {scales.get_dtype()}, must be of "
                f"{', '.join(SCALE_TYPES)}"
            )
        return scales[:]

    def check(self, *, with_output_layer: bool) -> int:
        """Check that every tensor of the model exists, and return the number of tensors. Multi-token prediction
        layers are checked but not counted.

        The check reads only headers and scales. With tied embeddings, an output matrix in the files must equal the
        embedding. This matrix is read if the output layer is needed.
        """
        required = [name for name in self._required_shapes if with_output_layer or name != HF_OUTPUT_LAYER]
        for name in required:
            if self._is_mxfp4(name):
                self._mxfp4(name)
            else:
                self._slice(name)
                self._scales(name)
        self.check_mtp_types()
        if with_output_layer and self._arch.tied_embeddings and HF_OUTPUT_LAYER in self._stored:
            self._check_tied()
        return len(required)

    def check_mtp_types(self) -> None:
        """Check that the tensors of `mtp_shapes` have a readable type, from headers and scales."""
        for name in self.mtp_shapes:
            self._slice(name)
            self._scales(name)

    def _check_tied(self) -> None:
        for start in range(0, self._arch.vocab_size, _COMPARED_ROWS):
            stop = min(start + _COMPARED_ROWS, self._arch.vocab_size)
            pieces = (Piece(name, 0, start, stop) for name in (HF_EMBEDDING, HF_OUTPUT_LAYER))
            embedding, head = map(self.read, pieces)
            common = torch.promote_types(embedding.dtype, head.dtype)
            if not torch.equal(embedding.to(common), head.to(common)):
                raise ValueError(
                    f"{self._folder} has an lm_head.weight that differs from its embedding, but its config.json has "
                    "tie_word_embeddings: true; set it to false to train the head, or remove the head from the "
                    "files"
                )

    def read(self, piece: Piece) -> Tensor:
        """Read a slice on the CPU in its stored type, float8 and MXFP4 as float32. Raises ValueError if the slice is
        not finite."""
        packed = self._parts.get(piece.name)
        if packed is not None:
            return packed.of(self._expert(packed.name, packed.expert)).narrow(piece.dim, piece.start, piece.size)
        return self._finite(self._read_plain(piece), piece.name)

    def _finite(self, part: Tensor, name: str) -> Tensor:
        stored = self._stored[name]
        return finite(part, stored, self._path_of[stored])

    def _read_plain(self, piece: Piece) -> Tensor:
        tensor, scales = self._slice(piece.name), self._scales(piece.name)
        rows = piece.dim == 0
        part: Tensor = tensor[piece.start : piece.stop] if rows else tensor[:, piece.start : piece.stop]
        if scales is None:
            return part
        blocks = self._arch.stored_blocks
        assert blocks is not None
        first_row, first_column = (piece.start, 0) if rows else (0, piece.start)
        return dequantised(part, scales, blocks, first_row=first_row, first_column=first_column)

    def _read_expert(self, name: str, expert: int) -> Tensor:
        """Return the part of one expert in a packed tensor. A matrix has shape (inputs, outputs)."""
        own = slice(expert, expert + 1)
        if self._is_mxfp4(name):
            blocks, scales = (tensor[own].squeeze(0) for tensor in self._mxfp4(name))
            return self._finite(dequantised_mxfp4(blocks, scales).t(), name + MXFP4[1])
        return self._finite(self._slice(name)[own].squeeze(0), name)

    def _is_mxfp4(self, name: str) -> bool:
        return any(name + suffix in self._stored for suffix in MXFP4)

    def _mxfp4(self, name: str) -> tuple[UnreadTensor, UnreadTensor]:
        """Return unread blocks and scales of the matrices of the experts of a layer."""
        experts, inputs, outputs = self._shapes[name]
        if name in self._stored or inputs % MXFP4_BLOCK:
            raise ValueError(
                f"'{self._stored.get(name, name)}' in {self._folder} is stored in MXFP4, which requires matrices "
                f"with a multiple of {MXFP4_BLOCK} inputs instead of {inputs}, without a plain tensor of the same "
                "name; fetch the model again"
            )
        shape = (experts, outputs, inputs // MXFP4_BLOCK)
        parts = []
        for suffix, expected in zip(MXFP4, ((*shape, MXFP4_BLOCK // 2), shape), strict=True):
            if name + suffix not in self._stored:
                raise ValueError(f"{self._folder} has no tensor '{name + suffix}'; fetch the model again")
            parts.append(self._unread(name + suffix, expected))
            kind = parts[-1].get_dtype()
            if kind != "U8":
                raise ValueError(
                    f"tensor '{self._stored[name + suffix]}' in {self._folder} is of type {kind}, must be U8 for MXFP4"
                )
        return parts[0], parts[1]

    def value_head(self) -> ValueHeadWeights | None:
        """Return the scalar head in the formats of transformers, TRL and OpenRLHF. Raises ValueError for more than
        one value."""
        names = self._head
        if names is None:
            return None
        weight = self._whole(names.weight, (1, self._arch.hidden_size)).float()
        bias = self._whole(names.bias, (1,)).float() if names.bias is not None else torch.zeros(1)
        if getattr(self._arch.hf_config, "normalize_reward", False):  # OpenRLHF's values are (output - mean) / std
            config = self._arch.hf_config
            mean, std = getattr(config, "mean", 0.0), getattr(config, "std", 1.0)
            weight, bias = weight / std, (bias - mean) / std
        return ValueHeadWeights(weight, bias)

    def _whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        kind = self._file_of[name].get_slice(name).get_dtype()
        if tensor.shape != shape or kind not in _PLAIN_TYPES:
            raise ValueError(
                f"the value head in {self._folder} cannot be read: '{name}' has shape {tuple(tensor.shape)} and "
                f"type {kind}; a critic returns one value per token: {shape} of {', '.join(_PLAIN_TYPES)}"
            )
        return finite(tensor, name, self._path_of[name])


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the random generator of a tensor, which depends only on the seed and the name."""
    return torch.Generator().manual_seed(derived_seed(seed, name))


class RandomSource:
    """Random weights that depend only on a seed and the name of the tensor. All layouts start from the same model."""

    def __init__(self, arch: ArchitectureConfig, seed: int) -> None:
        self._std, self._shapes, self._seed = arch.initializer_range, tensor_shapes(arch), seed
        drawn = (p for p in model_parameters(arch, experts=()) if p.drawn != "by_shape")
        self._drawn = {name: parameter.drawn for parameter in drawn for name in parameter.hf}
        self._less_one = arch.declaration.has_zero_centered_norms(arch)
        # The slices of one parameter come from at most three tensors (query, key, value).
        self._whole = lru_cache(maxsize=3)(self._draw)

    def _draw(self, name: str) -> Tensor:
        """Draw a normal(0, initializer_range) matrix, a norm that multiplies by one, a bias of zeros, or the special
        initialisation of the family."""
        shape, drawn = self._shapes[name], self._drawn.get(name)
        if drawn == "ones":
            return torch.ones(shape)
        if drawn == "rates":
            return torch.empty(shape).uniform_(0.01, 16, generator=generator_of(self._seed, name)).log_()
        if len(shape) == 1 and drawn != "normal":
            return torch.zeros(shape) if name.endswith(".bias") or self._less_one else torch.ones(shape)
        return torch.randn(shape, generator=generator_of(self._seed, name)) * self._std

    def read(self, piece: Piece) -> Tensor:
        """Return the slice on the CPU in float32."""
        return self._whole(piece.name).narrow(piece.dim, piece.start, piece.size)

    def value_head(self) -> None:
        """Return None, because a new head is drawn with `critic.value_head_std`."""
