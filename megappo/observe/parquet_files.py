"""Reads parquet files of unknown origin: as a table, or columns as numpy arrays.

Without torch, so that a command that shows numbers starts quickly.
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
"""Numbers of a column: integers, floats or booleans."""


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> pyarrow.Table:
    """The table of a file; `columns`: only these, as far as the file has them. Raises ValueError for a damaged file."""
    import pyarrow
    from pyarrow import parquet

    try:
        check_plain(path)
        there = None if columns is None else [name for name in parquet.read_schema(path).names if name in columns]
        table = parquet.read_table(path, columns=there)
        table.column_names  # noqa: B018 - raises for names that are not UTF-8
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a readable parquet file ({reason(error)}); write it again") from error
    return table


class ColumnFile:
    """Columns of a file. Raises ValueError for a file that cannot be read, and for a column that is missing or of
    another type."""

    def __init__(self, path: Path, columns: Sequence[str] | None = None) -> None:
        self._table = read_parquet(path, columns)

    def __contains__(self, name: str) -> bool:
        return name in self._table.column_names

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def _column(self, name: str) -> pyarrow.Array:
        """A column in one chunk."""
        if name not in self:
            raise ValueError(f"there is no column {name}")
        found = self._table.column(name).combine_chunks()
        return found.chunk(0) if hasattr(found, "chunk") else found

    def row(self, number: int) -> ColumnFile:
        """The file's columns, reduced to one row."""
        one = ColumnFile.__new__(ColumnFile)
        one._table = self._table.slice(number, 1)
        return one

    def plain(self, name: str) -> list[Any]:
        """A column of texts, numbers or bytes, one per row."""
        return list(self._column(name).to_pylist())

    def texts(self, name: str) -> list[str | None]:
        """A column of texts, one per row or None. Raises ValueError for other types."""
        found = self.plain(name)
        if not all(text is None or isinstance(text, str) for text in found):
            raise ValueError(f"column {name} has no texts")
        return found

    def numbers(self, name: str) -> Numbers:
        """(B,): a column of numbers, one per row."""
        return _array(self._column(name), name)

    def lists(self, name: str) -> tuple[list[int], Numbers]:
        """A column of lists of numbers: the length of each row, and the numbers of all rows, concatenated."""
        column = self._lists(name)
        return column.value_lengths().to_pylist(), _array(column.flatten(), name)

    def text_lists(self, name: str) -> list[list[str]]:
        """A column of lists of texts."""
        found = self._lists(name).to_pylist()
        if not all(isinstance(text, str) for row in found for text in row):
            raise ValueError(f"column {name} has no lists of texts")
        return found

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
    found: Numbers = column.to_numpy(zero_copy_only=False)
    return found
