"""Rows of JSON lines and parquet files, and error messages for unreadable rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.errors import reason, shortened
from megappo.files.json_values import JSONValue
from megappo.files.plain_files import check_plain

if TYPE_CHECKING:
    import pyarrow

_SHOWN_CHARACTERS = 80


def shown(value: object) -> str:
    """Return a value of a record as text for a message."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a custom class, or a number with too many digits for Python
        text = f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return shortened(text, _SHOWN_CHARACTERS)


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, JSONValue]]]:
    """Yield each object of a file of JSON lines, with its place for errors. Raises ValueError if a line is not an
    object."""
    for number, line in enumerate(_bytes_of(path).removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            where = f"{path} line {number}"
            yield where, _json_object(line, where)


def _bytes_of(path: Path) -> bytes:
    try:
        check_plain(path)
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"data file '{path}' cannot be read ({error.strerror}); check its permissions") from error


def _json_object(line: bytes, where: str) -> dict[str, JSONValue]:
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 (byte {error.start}); convert the file") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error.msg} at column {error.colno}); fix or remove it") from error
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits, deeply nested brackets
        raise ValueError(f"{where} is JSON that Python cannot read ({error}); fix or remove it") from error
    if not isinstance(fields, dict):
        raise ValueError(f'{where} is {shown(fields)}, must be an object like {{"prompt": ...}}; fix it')
    return fields


def table_rows(table: pyarrow.Table, place: str | Path) -> Iterator[tuple[str, dict[str, JSONValue]]]:
    """Yield each row in JSON types, with its place for errors. Arrow does not check UTF-8 and dates before conversion
    to Python."""
    first = 0
    for batch in table.to_batches(max_chunksize=1024):
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError):
            rows = (_row(batch, i, f"{place} row {first + i}") for i in range(batch.num_rows))
        for number, row in enumerate(rows, start=first):
            yield f"{place} row {number}", {name: _without_fillings(value) for name, value in row.items()}
        first += batch.num_rows


def _without_fillings(value: JSONValue) -> JSONValue:
    """Return the value without nulls. Arrow fills missing fields of structs with nulls. Written nulls are also removed,
    because they look the same."""
    if isinstance(value, dict):
        return {name: _without_fillings(inner) for name, inner in value.items() if inner is not None}
    return [_without_fillings(inner) for inner in value] if isinstance(value, list) else value


def _row(batch: pyarrow.RecordBatch, i: int, where: str) -> dict[str, JSONValue]:
    try:
        return batch.slice(i, 1).to_pylist()[0]
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where} contains a value that cannot be read ({reason(error)}); fix it") from error
