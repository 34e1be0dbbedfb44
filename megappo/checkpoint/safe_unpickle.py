"""Reads pickles from untrusted sources. Listed names become inert records, and all other names are errors.

Python's unpickler can run any program from a pickle. This module never imports or calls the names of a pickle.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import IO, Any, TypeAlias

import torch

# Errors that Python raises for malformed pickles.
PICKLE_ERRORS = (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError,
                 OverflowError, MemoryError, RecursionError)  # fmt: skip


class UnlistedNameError(Exception):
    """A pickle contains a name that is not on the list. The message is the name."""


Pickled: TypeAlias = (
    "bool | int | float | complex | str | bytes | bytearray | list[Pickled] | tuple[Pickled, ...] | set[Pickled] | "
    "frozenset[Pickled] | dict[Pickled, Pickled] | PickledRecord | torch.dtype | type | None"
)
"""Results of the unpicklers in this module."""


class PickledRecord:
    """An object of a pickle as inert data: arguments of the constructor, and state."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Pickled) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Pickled) -> None:
        self.state = state


Names = Mapping[tuple[str, str], type]


def inert_names(listed: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], type]:
    """Return a record type for each name of each module."""
    return {
        (module, name): type(name, (PickledRecord,), {"__module__": __name__})
        for module, names in listed.items()
        for name in names
    }


class InertUnpickler(pickle.Unpickler):
    """Unpickler that converts listed names to records, and supports data types of torch. Raises UnlistedNameError for
    other names."""

    def __init__(self, file: IO[bytes], names: Names) -> None:
        super().__init__(file)
        self._names = names

    def find_class(self, module: str, name: str) -> type | torch.dtype:
        """See `pickle`."""
        type_of_name: type | torch.dtype | None = self._names.get((module, name))
        if type_of_name is None and module == "torch":
            type_of_name = vars(torch).get(name)
            type_of_name = type_of_name if isinstance(type_of_name, torch.dtype) else None
        if type_of_name is None:
            raise UnlistedNameError(f"{module}.{name}")
        return type_of_name


def record(value: Pickled, name: str) -> PickledRecord:
    """Return a value that is a record with this name. Raises ValueError for other values."""
    if type(value).__name__ != name or not isinstance(value, PickledRecord):
        raise ValueError(f"{type(value).__name__} instead of {name}")
    return value


def state_of(value: Pickled, name: str) -> Mapping[str, Any]:
    """Return the fields of a record with this name. Raises ValueError for other values."""
    state = record(value, name).state
    if not isinstance(state, dict):
        raise ValueError(f"{name} without fields")
    return state
