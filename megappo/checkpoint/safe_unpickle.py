"""Reads pickles without trusting them: names that are listed become inert records, every other name is an error.

A pickle can run any program when Python's unpickler reads it. Here nothing that it names is imported or called.
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
    """A pickle names what is not on the list; the message is the name."""


Pickled: TypeAlias = (
    "bool | int | float | complex | str | bytes | bytearray | list[Pickled] | tuple[Pickled, ...] | set[Pickled] | "
    "frozenset[Pickled] | dict[Pickled, Pickled] | PickledRecord | torch.dtype | type | None"
)
"""What the unpicklers here make."""


class PickledRecord:
    """An object of a pickle as inert data: the arguments of its constructor and its state."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Pickled) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Pickled) -> None:
        self.state = state


Names = Mapping[tuple[str, str], type]


def inert_names(listed: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], type]:
    """A type of records for each name in each module."""
    return {
        (module, name): type(name, (PickledRecord,), {"__module__": __name__})
        for module, names in listed.items()
        for name in names
    }


class InertUnpickler(pickle.Unpickler):
    """Unpickler that makes records of listed names, and data types of torch. Raises UnlistedNameError for other
    names."""

    def __init__(self, file: IO[bytes], names: Names) -> None:
        super().__init__(file)
        self._names = names

    def find_class(self, module: str, name: str) -> type | torch.dtype:
        """See `pickle`."""
        found: type | torch.dtype | None = self._names.get((module, name))
        if found is None and module == "torch":
            found = vars(torch).get(name)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise UnlistedNameError(f"{module}.{name}")
        return found


def record(value: Pickled, name: str) -> PickledRecord:
    """Return a value that is a record of that name. Raises ValueError where it is not."""
    if type(value).__name__ != name or not isinstance(value, PickledRecord):
        raise ValueError(f"{type(value).__name__} instead of {name}")
    return value


def state_of(value: Pickled, name: str) -> Mapping[str, Any]:
    """The fields of a recorded object of that name. Raises ValueError where it is something else."""
    state = record(value, name).state
    if not isinstance(state, dict):
        raise ValueError(f"{name} without fields")
    return state
