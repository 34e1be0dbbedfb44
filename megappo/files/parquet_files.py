"""Reads parquet files of unknown origin as tables or numpy arrays.

This module does not import torch, so that commands start quickly.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from megappo.errors import reason
from megappo.files.plain_files import check_plain

if TYPE_CHECKING:
    import numpy as np
    import pyarrow
    from numpy.typing import NDArray

Numbers: TypeAlias = "NDArray[np.number | np.bool]"
"""Integers, floats or booleans of a column."""


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a readable parquet file ({reason(error)}); write it again") from error


def read_parquet(path: Path) -> pyarrow.Table:
    """Return the table of a file. Raises ValueError if the file is damaged."""
    from pyarrow import parquet

    with _readable(path):
        check_plain(path)
        table = parquet.read_table(path)
        table.column_names  # noqa: B018 - raises for names that are not UTF-8
    return table


class ColumnFile:
    """Columns of a file, each read at its first use. Raises ValueError if the file cannot be read, or if a column is
    missing or has a wrong type."""

    def __init__(self, path: Path) -> None:
        from pyarrow import parquet

        self._path = path
        with _readable(path):
            check_plain(path)
            self._file = parquet.ParquetFile(path)
            self._names = self._file.schema_arrow.names
        self._columns: dict[str, pyarrow.Array] = {}
        self._row: int | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows) if self._row is None else 1

    def _column(self, name: str) -> pyarrow.Array:
        """Return a column as one chunk."""
        if name not in self:
            raise ValueError(f"there is no column {name}")
        if name not in self._columns:
            with _readable(self._path):
                column = self._file.read([name]).column(name).combine_chunks()
            self._columns[name] = column.chunk(0) if hasattr(column, "chunk") else column
        return self._columns[name] if self._row is None else self._columns[name].slice(self._row, 1)

    def row(self, number: int) -> Self:
        """Return the columns of one row."""
        one = copy.copy(self)
        one._row = number
        return one

    def plain(self, name: str) -> list[Any]:
        """Return a column of texts, numbers or bytes, one value per row."""
        return list(self._column(name).to_pylist())

    def texts(self, name: str) -> list[str | None]:
        """Return a column of texts, one text or None per row. Raises ValueError if the column has another type."""
        values = self.plain(name)
        if not all(text is None or isinstance(text, str) for text in values):
            raise ValueError(f"column {name} has no texts")
        return values

    def numbers(self, name: str) -> Numbers:
        """Return a column of numbers, one per row: (B,)."""
        return _array(self._column(name), name)

    def lists(self, name: str) -> tuple[list[int], Numbers]:
        """Return the lengths of the lists of a column, and the concatenated numbers of all rows."""
        column = self._lists(name)
        return column.value_lengths().to_pylist(), _array(column.flatten(), name)

    def text_lists(self, name: str) -> list[list[str]]:
        """Return a column of lists of texts."""
        rows = self._lists(name).to_pylist()
        if not all(isinstance(text, str) for row in rows for text in row):
            raise ValueError(f"column {name} has no lists of texts")
        return rows

    def _lists(self, name: str) -> pyarrow.Array:
        import pyarrow

        column, types = self._column(name), pyarrow.types
        if not (types.is_list(column.type) or types.is_large_list(column.type)) or column.null_count:
            raise ValueError(f"column {name} has no list in each row")
        return column


def _array(column: pyarrow.Array, name: str) -> Numbers:
    import pyarrow

    kind, types = column.type, pyarrow.types
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)) or column.null_count:
        raise ValueError(f"column {name} has no numbers")
    numbers: Numbers = column.to_numpy(zero_copy_only=False)
    return numbers
