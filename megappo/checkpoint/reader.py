"""Reads what torch's writer has written, without trusting it.

torch keeps in `.metadata` which tensors there are and where each part of them lies, as a pickle, which can run any
program when pickle reads it. Here the few names that torch's writer puts into it become inert records, every other
name is an error, and the metadata that torch's loader gets are built anew from numbers and texts that were checked.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
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
from megappo.errors import reason

METADATA = ".metadata"
_SHARD_FILE = re.compile(r"__\d+_\d+\.distcp")
# What a pickle that is not what it claims to be makes Python raise.
_PICKLE_ERRORS = (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError,
                  OverflowError, MemoryError)  # fmt: skip


class _PickledRecord:
    """What a pickle says of an object, and nothing more: the arguments of its constructor and its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments: tuple[Any, ...] = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


# Names that torch 2.11 to 2.14 write. Tensors only: what torch calls bytes would be read by an unguarded pickle again.
_IN_METADATA = ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
                "StorageMeta", "_MEM_FORMAT_ENCODING")  # fmt: skip
_RECORDS: dict[tuple[str, str], type[_PickledRecord]] = {
    (module, name): type(name, (_PickledRecord,), {})
    for module, names in (
        ("torch.distributed.checkpoint.metadata", _IN_METADATA),
        ("torch.distributed.checkpoint.filesystem", ("_StorageInfo",)),
        ("torch.serialization", ("_get_layout",)),
        ("torch", ("Size",)),
        ("pathlib", ("PosixPath",)),
        ("builtins", ("getattr",)),  # Python before 3.11.4 pickles a member of an enumeration as a call of it
    )
    for name in names
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found: Any = _RECORDS.get((module, name))
        if found is None and module == "torch":
            found = vars(torch).get(name)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise DamagedError(f"{METADATA} names {module}.{name}, which no checkpoint does; who wrote it?")
        return found


def read_metadata(folder: Path) -> Metadata:
    """Which tensors a checkpoint holds, and where. Raises DamagedError for anything that a checkpoint does not say."""
    try:
        with (folder / METADATA).open("rb") as file:
            root = _Unpickler(file).load()
        fields = _state(root, "Metadata")
        return Metadata(
            state_dict_metadata={_text(key): _tensor(entry) for key, entry in fields["state_dict_metadata"].items()},
            storage_data={_index(index): _place(place) for index, place in fields["storage_data"].items()},
            storage_meta=StorageMeta(),
        )
    except OSError as error:
        raise DamagedError(f"{METADATA} cannot be read: {error.strerror}") from error
    except _PICKLE_ERRORS as error:
        raise DamagedError(f"{METADATA} is not what a checkpoint holds ({type(error).__name__}: {error})") from error


def load_values(path: Path) -> Any:
    """Tensors and plain values that one rank wrote. Raises ValueError where a file holds anything else."""
    try:
        return torch.load(path, weights_only=True)
    except (*_PICKLE_ERRORS, OSError, RuntimeError) as error:
        raise ValueError(f"{path} does not hold tensors and plain values alone: {reason(error)}") from error


class ShardReader(FileSystemReader):
    """Reads tensors by metadata that were checked."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        """What the constructor was given; files are not asked again."""
        return self._metadata


def _record(value: Any, name: str) -> _PickledRecord:
    if type(value).__name__ != name or not isinstance(value, _PickledRecord):
        raise ValueError(f"{type(value).__name__} instead of {name}")
    return value


def _state(value: Any, name: str) -> Mapping[str, Any]:
    """The fields of a recorded dataclass of that name. Raises ValueError where it is something else."""
    state = _record(value, name).state
    if not isinstance(state, dict):
        raise ValueError(f"{name} without fields")
    return state


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} instead of a name")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} instead of a count")
    return value


def _size(value: Any) -> torch.Size:
    (numbers,) = _record(value, "Size").arguments
    return torch.Size([_count(number) for number in numbers])


def _tensor(value: Any) -> TensorStorageMetadata:
    fields = _state(value, "TensorStorageMetadata")
    # The data type and four or five things that are the same for every tensor of a checkpoint.
    dtype = _record(fields["properties"], "TensorProperties").state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{type(dtype).__name__} instead of a data type")
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        _size(fields["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(value: Any) -> MetadataIndex:
    fields = _state(value, "MetadataIndex")
    return MetadataIndex(_text(fields["fqn"]), _size(fields["offset"]), _count(fields["index"]))


def _place(value: Any) -> _StorageInfo:
    fields = _state(value, "_StorageInfo")
    name = _text(fields["relative_path"])
    if not _SHARD_FILE.fullmatch(name) or fields.get("transform_descriptors"):
        raise ValueError(f"tensors in {name!r:.80}")
    return _StorageInfo(name, _count(fields["offset"]), _count(fields["length"]))
