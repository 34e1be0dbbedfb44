"""Reads parquet files of unknown origin as tables or numpy arrays.

This module does not import torch, so that commands start quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from megappo.errors import reason
from megappo.observe.plain_files import check_plain

if TYPE_CHECKING:
    import numpy as np
    import pyarrow
    from numpy.typing import NDArray

Numbers: TypeAlias = "NDArray[np.number | np.bool]"
"""Integers, floats or booleans of a column."""


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> pyarrow.Table:
    """Return the table of a file. With `columns`, other columns are not read, and missing columns are ignored. Raises
    ValueError if the file is damaged."""
    import pyarrow
    from pyarrow import parquet

    try:
        check_plain(path)
        present = None if columns is None else [name for name in parquet.read_schema(path).names if name in columns]
        table = parquet.read_table(path, columns=present)
        table.column_names  # noqa: B018 - raises for names that are not UTF-8
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a readable parquet file ({reason(error)}); write it again") from error
    return table


class ColumnFile:
    """Columns of a file. Raises ValueError if the file cannot be read, or if a column is missing or has a wrong
    type."""

    def __init__(self, path: Path, columns: Sequence[str] | None = None) -> None:
        self._table = read_parquet(path, columns)

    def __contains__(self, name: str) -> bool:
        return name in self._table.column_names

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def _column(self, name: str) -> pyarrow.Array:
        """Return a column as one chunk."""
        if name not in self:
            raise ValueError(f"there is no column {name}")
        column = self._table.column(name).combine_chunks()
        return column.chunk(0) if hasattr(column, "chunk") else column

    def row(self, number: int) -> ColumnFile:
        """Return the columns of one row."""
        one = ColumnFile.__new__(ColumnFile)
        one._table = self._table.slice(number, 1)
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
