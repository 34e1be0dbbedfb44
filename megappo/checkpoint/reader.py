"""Reads checkpoints of torch.distributed.checkpoint from untrusted sources.

torch stores the list of tensors and their locations in `.metadata`, which is a pickle. Python's unpickler can run any
program from a pickle. This module converts the pickle to inert records (`safe_unpickle.py`), and builds the metadata
for torch's loader from checked numbers and texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megappo.checkpoint.files import DamagedError
from megappo.checkpoint.safe_unpickle import (
    PICKLE_ERRORS,
    InertUnpickler,
    Names,
    Pickled,
    UnlistedNameError,
    inert_names,
    record,
    state_of,
)
from megappo.errors import reason

METADATA = ".metadata"
_SHARD_FILE = re.compile(r"__\d+_\d+\.distcp")

# Names in files of torch 2.11 to 2.14. Only tensors, because torch loads objects stored as bytes with an unsafe pickle.
_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath",),
    "builtins": ("getattr",),  # Python before 3.11.4 pickles members of enumerations as calls
}  # fmt: skip
_OWN = inert_names(_NAMES)
# Further names of Megatron-Core's writer, in unused parts: bytes, and cached plans for later checkpoints.
_OF_MEGATRON = _OWN | inert_names({
    "torch.distributed.checkpoint.metadata": ("BytesStorageMetadata",),
    "torch.distributed.checkpoint.planner": (
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StoragePrefix",),
    "pathlib._local": ("PosixPath",),  # Python 3.13
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
})  # fmt: skip
_BYTES = _OF_MEGATRON["torch.distributed.checkpoint.metadata", "BytesStorageMetadata"]


def read_metadata(folder: Path) -> Metadata:
    """Return the tensors of a checkpoint and their locations. Raises DamagedError if the metadata contain other
    objects."""
    return _metadata(folder, _OWN, lambda _: True)


def read_metadata_of_megatron(folder: Path, selects: Callable[[str], bool]) -> Metadata:
    """Return the metadata of a Megatron-Core checkpoint for the names that `selects` accepts. Objects stored as bytes
    have a location in a file but no entry."""
    return _metadata(folder, _OF_MEGATRON, selects)


def _metadata(folder: Path, names: Names, selects: Callable[[str], bool]) -> Metadata:
    try:
        with (folder / METADATA).open("rb") as file:
            root = InertUnpickler(file, names).load()
        fields = state_of(root, "Metadata")
        tensors = {
            key: _tensor(entry)
            for key, entry in fields["state_dict_metadata"].items()
            if selects(_text(key)) and type(entry) is not _BYTES
        }
        places = {
            _index(index): _place(place)
            for index, place in fields["storage_data"].items()
            if selects(_text(state_of(index, "MetadataIndex")["fqn"]))
        }
        return Metadata(state_dict_metadata=dict(tensors), storage_data=places, storage_meta=StorageMeta())
    except UnlistedNameError as error:
        raise DamagedError(
            f"{METADATA} names {error}, which no checkpoint contains; check the origin of the file"
        ) from error
    except OSError as error:
        raise DamagedError(f"{METADATA} cannot be read: {error.strerror}") from error
    except PICKLE_ERRORS as error:
        raise DamagedError(f"{METADATA} has invalid content ({type(error).__name__}: {error})") from error


def load_values(path: Path) -> Any:
    """Return the tensors and plain values of a rank. Raises ValueError if the file contains other objects."""
    try:
        return torch.load(path, weights_only=True)
    except (*PICKLE_ERRORS, OSError, RuntimeError) as error:
        raise ValueError(f"{path} must contain only tensors and plain values: {reason(error)}") from error


class ShardReader(FileSystemReader):
    """Reader of tensors with checked metadata."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        """Return the metadata from the constructor, without reading the file again."""
        return self._metadata


def _text(value: Pickled) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} instead of a name")
    return value


def _count(value: Pickled) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} instead of a count")
    return value


def _size(value: Pickled) -> torch.Size:
    (numbers,) = record(value, "Size").arguments
    return torch.Size([_count(number) for number in numbers])


def _tensor(value: Pickled) -> TensorStorageMetadata:
    fields = state_of(value, "TensorStorageMetadata")
    # The state contains the data type, and four or five values that are equal for all tensors of a checkpoint.
    dtype = record(fields["properties"], "TensorProperties").state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{type(dtype).__name__} instead of a data type")
    chunks = [state_of(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        _size(fields["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(value: Pickled) -> MetadataIndex:
    fields = state_of(value, "MetadataIndex")
    # Bytes have no offset. Megatron-Core omits the hint.
    offset, number = fields.get("offset"), fields.get("index")
    name, index = _text(fields["fqn"]), None if number is None else _count(number)
    return MetadataIndex(name, None if offset is None else _size(offset), index)


def _place(value: Pickled) -> _StorageInfo:
    fields = state_of(value, "_StorageInfo")
    name = _text(fields["relative_path"])
    if not _SHARD_FILE.fullmatch(name) or fields.get("transform_descriptors"):
        raise ValueError(f"tensors in {name!r:.80}")
    return _StorageInfo(name, _count(fields["offset"]), _count(fields["length"]))
