"""Source of a model's weights in a checkpoint of Megatron-LM. A rank reads only the parts that the rank needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from megappo.checkpoint.files import DamagedError
from megappo.checkpoint.reader import read_metadata_of_megatron
from megappo.checkpoint.safe_unpickle import PICKLE_ERRORS
from megappo.checkpoint.torch_dist.common import read_arguments, require_arguments
from megappo.checkpoint.torch_dist.places import (
    OUTPUT_BIAS,
    StoredPlace,
    StoredRows,
    chosen_places,
    is_padded,
    places,
    rows_of,
)
from megappo.errors import RunError, first_of, reason
from megappo.families.declaration import ArchitectureConfig, Shape
from megappo.families.parameters import EMBEDDING, OUTPUT_LAYER, Parameter, Piece, model_parameters
from megappo.families.weights import ValueHeadWeights
from megappo.models.weight_files import finite

_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_OPTIMIZER = ("optimizer.", "chained_")
_EXTRA_STATE = "_extra_state"
_At = tuple[str, tuple[int, ...]]
"""Name of a stored tensor, and its index: layer, expert, both or neither."""


@dataclass(frozen=True)
class _Stored:
    """Part of a stored tensor from one rank: offsets, sizes, and bytes in a file."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int

    @property
    def ends(self) -> Shape:
        """End of the part along each axis."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


class TorchDistSource:
    """Weights of a checkpoint of Megatron-LM with any layout.

    Raises ValueError if a tensor of the model is missing or has another shape, if the checkpoint contains other
    tensors, if the saved arguments contradict the architecture, or if a file is too short.
    """

    def __init__(self, folder: Path, role: str, arch: ArchitectureConfig) -> None:
        self._folder, self._arch = folder, arch
        try:
            self._metadata = read_metadata_of_megatron(folder, _is_of_model)
        except DamagedError as error:
            raise ValueError(f"the checkpoint {folder} is damaged: {error}") from error
        self._tensors = {
            key: entry
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._head = self._value_head_places(role)
        arguments = read_arguments(folder, self._metadata)
        if arguments is not None:
            embedding = self._tensors.get(EMBEDDING)
            require_arguments(
                arguments, arch, embedding.size[0] if embedding is not None and embedding.size else 0, role
            )
        parameters = [p for p in model_parameters(arch) if role != "critic" or p.megatron != OUTPUT_LAYER]
        self._rows = self._find(parameters)
        self._require_known(role)
        required = [rows.place for rows in self._rows.values()] + list(self._head)
        self._file_bytes: dict[str, int] = {}
        self._parts = self._find_parts({place.key: len(place.counts) for place in required})
        for place in dict.fromkeys(required):
            self._require_whole(place)
        self._last: tuple[_At | None, dict[_Stored, Tensor]] = (None, {})
        """Last read parts of one place. The cache serves consecutive reads of slices of a parameter."""

    def _find(self, parameters: list[Parameter]) -> dict[str, StoredRows]:
        """Return the stored rows of each Hugging Face tensor. Raises ValueError if a tensor is missing, or has another
        shape or type."""
        rows: dict[str, StoredRows] = {}
        for parameter in parameters:
            try:
                way = chosen_places(self._arch, parameter, self._tensors)
            except ValueError as error:
                raise ValueError(f"{self._folder} {error}, which config.json requires") from error
            for place in way:
                self._require_shape(place, padded=is_padded(parameter))
            rows |= rows_of(self._arch, parameter, way)
        return rows

    def _require_shape(self, place: StoredPlace, *, padded: bool) -> None:
        entry = self._tensors[place.key]
        size = tuple(entry.size)
        enough = padded and size[1:] == place.size[1:] and size[0] >= place.size[0]
        if size != place.size and not enough:
            least = "at least " if padded else ""
            raise ValueError(
                f"tensor '{place.key}' in {self._folder} has shape {size}, config.json requires {least}{place.size}; "
                "use a model of the same architecture"
            )
        if entry.properties.dtype not in _TYPES:
            raise ValueError(
                f"tensor '{place.key}' in {self._folder} is of type {entry.properties.dtype}, which cannot be read; "
                f"use weights of type {', '.join(map(str, _TYPES))}"
            )

    def _value_head_places(self, role: str) -> tuple[StoredPlace, ...]:
        """Return the places of a critic's head: weight and optional bias. Return an empty tuple for a language
        model."""
        shapes: Mapping[str, Shape] = {OUTPUT_LAYER: (1, self._arch.hidden_size), OUTPUT_BIAS: (1,)}
        present = [key for key, shape in shapes.items() if key in self._tensors and self._tensors[key].size == shape]
        if OUTPUT_LAYER not in present:
            return ()
        if role != "critic":
            raise ValueError(f"{self._folder} contains a critic, with one value as output; use a language model")
        return tuple(StoredPlace(key, shapes[key]) for key in present)

    def _require_known(self, role: str) -> None:
        """Check that all tensors belong to the model. Raises ValueError for other tensors."""
        others = self._tensors.keys() - {rows.place.key for rows in self._rows.values()}
        others -= {place.key for place in self._head}
        if role == "critic":
            others.discard(OUTPUT_LAYER)
        if others:  # a norm may have both names
            parameters = model_parameters(self._arch, experts=())
            others -= {place.key for p in parameters for way in places(self._arch, p) for place in way}
        if others:
            raise ValueError(
                f"{self._folder} contains {first_of(sorted(others), 3)}, which a {self._arch.family} of its "
                "config.json does not have; use a model of the same architecture"
            )

    def _find_parts(self, axes: Mapping[str, int]) -> dict[_At, list[_Stored]]:
        """Return the parts of tensors at each index along the first axes. `axes`: number of first axes by tensor.
        Raises ValueError for impossible parts."""
        parts: dict[_At, list[_Stored]] = {}
        for key, n_axes in axes.items():
            for chunk in self._tensors[key].chunks:
                part = self._part(key, chunk)
                for index in itertools.product(*map(range, part.offsets[:n_axes], part.ends[:n_axes])):
                    parts.setdefault((key, index), []).append(part)
        return parts

    def _part(self, key: str, chunk: ChunkStorageMetadata) -> _Stored:
        location = self._metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
        size = self._tensors[key].size
        if location is None or not len(chunk.offsets) == len(chunk.sizes) == len(size):
            raise ValueError(f"the checkpoint {self._folder} is damaged: '{key}' has a part without a location")
        part = _Stored(
            tuple(chunk.offsets), tuple(chunk.sizes), location.relative_path, location.offset, location.length
        )
        if any(end > most for end, most in zip(part.ends, size, strict=True)):
            raise ValueError(f"the checkpoint {self._folder} is damaged: '{key}' has a part outside of the tensor")
        self._require_bytes(part.file, part.start + part.length)
        return part

    def _require_bytes(self, file: str, n_bytes: int) -> None:
        if file not in self._file_bytes:
            path = self._folder / file
            self._file_bytes[file] = path.stat().st_size if path.is_file() else -1
        size = self._file_bytes[file]
        if size < n_bytes:
            state = "is missing" if size < 0 else f"has {size} bytes, but must have at least {n_bytes}"
            raise ValueError(f"the checkpoint {self._folder} is damaged: {file} {state}; fetch it again")

    def _require_whole(self, place: StoredPlace) -> None:
        n_axes = len(place.counts)
        elements = sum(math.prod(part.sizes[n_axes:]) for part in self._parts.get((place.key, place.index), ()))
        if elements != math.prod(self._tensors[place.key].size[n_axes:]):
            raise ValueError(f"the checkpoint {self._folder} is damaged: '{place.key}' is incomplete")

    def read(self, piece: Piece) -> Tensor:
        """See `WeightSource`. The result has the stored type. Raises ValueError if a value is not finite."""
        return finite(self._read_piece(piece), piece.name, self._folder)

    def _read_piece(self, piece: Piece) -> Tensor:
        rows = self._rows[piece.name]
        if piece.dim == 0:
            runs = list(rows.runs(piece.start, piece.stop)) or [(0, 0)]  # a rank may contain only padding
            return torch.cat([self._read(rows.place, (run,)) for run in runs])
        (run,) = rows.runs(0, rows.run)
        return self._read(rows.place, (run, (piece.start, piece.stop)))

    def _read(self, place: StoredPlace, ranges: tuple[tuple[int, int], ...]) -> Tensor:
        """Read a part of a place: a range of rows, and optionally a range of columns."""
        box = (*ranges, *((0, width) for width in place.shape[len(ranges) :]))
        whole = torch.empty([stop - start for start, stop in box], dtype=self._tensors[place.key].properties.dtype)
        n_axes = len(place.counts)
        for part in self._parts[place.key, place.index]:
            spans = zip(box, part.offsets[n_axes:], part.ends[n_axes:], strict=True)
            common = [(max(start, first), min(stop, end)) for (start, stop), first, end in spans]
            if all(start < stop for start, stop in common):
                index = tuple(i - first for i, first in zip(place.index, part.offsets[:n_axes], strict=True))
                source, target = _slices(common, part.offsets[n_axes:]), _slices(common, [start for start, _ in box])
                whole[target] = self._loaded(place, part)[index + source]
        return whole

    def _loaded(self, place: StoredPlace, part: _Stored) -> Tensor:
        at = place.key, place.index
        if self._last[0] != at:
            self._last = (at, {})  # frees the parts of another place
        loaded = self._last[1]
        if part not in loaded:
            loaded[part] = self._load(place.key, part)
        return loaded[part]

    def _load(self, key: str, part: _Stored) -> Tensor:
        path = self._folder / part.file
        try:
            with path.open("rb") as file:
                file.seek(part.start)
                tensor = torch.load(BytesIO(file.read(part.length)), map_location="cpu", weights_only=True)
        except (*PICKLE_ERRORS, OSError, RuntimeError) as error:
            raise RunError(f"'{key}' in {path} cannot be read ({reason(error)}); fetch the checkpoint again") from error
        expected = part.sizes, self._tensors[key].properties.dtype
        if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != expected:
            raise RunError(f"'{key}' in {path} differs from the metadata of the checkpoint; fetch the checkpoint again")
        return tensor

    def value_head(self) -> ValueHeadWeights | None:
        """See `WeightSource`."""
        if not self._head:
            return None
        tensors = [self._read(place, ((0, 1),)).float() for place in self._head]
        return ValueHeadWeights(tensors[0], tensors[1] if len(tensors) > 1 else torch.zeros(1))


def _slices(ranges: Sequence[tuple[int, int]], firsts: Sequence[int]) -> tuple[slice, ...]:
    """Return slices of the ranges, relative to `firsts`."""
    return tuple(slice(start - first, stop - first) for (start, stop), first in zip(ranges, firsts, strict=True))


def _is_of_model(key: str) -> bool:
    """Return whether a tensor belongs to the model, and not to the optimizer state or the extra state of Transformer
    Engine."""
    return not key.startswith(_OPTIMIZER) and _EXTRA_STATE not in key
