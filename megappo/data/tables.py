"""Rows of JSON lines and of parquet files, and the sentence for each that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.errors import reason, shortened
from megappo.observe.json_values import JSONValue
from megappo.observe.plain_files import check_plain

if TYPE_CHECKING:
    import pyarrow

_SHOWN_CHARACTERS = 80


def shown(value: object) -> str:
    """A value of a record in a sentence."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a user's class, or a number with more digits than Python writes
        text = f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return shortened(text, _SHOWN_CHARACTERS)


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, JSONValue]]]:
    """Each object of a file of JSON lines, with its place as errors name it. Raises ValueError for a line that is not
    an object."""
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
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, deeply nested brackets
        raise ValueError(f"{where} is JSON beyond what Python reads ({error}); fix or remove it") from error
    if not isinstance(fields, dict):
        raise ValueError(f'{where} holds {shown(fields)}, must be an object like {{"prompt": ...}}; fix it')
    return fields


def table_rows(table: pyarrow.Table, place: str | Path) -> Iterator[tuple[str, dict[str, JSONValue]]]:
    """Each row with its place as errors name it, in the types that a file of JSON lines has. Arrow checks neither UTF-8
    nor dates before it converts a value to Python."""
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
    """The value without the nulls that Arrow fills in where a struct lacks a field that others of its column have.
    Nulls that were written are dropped too, as nothing tells them apart."""
    if isinstance(value, dict):
        return {name: _without_fillings(inner) for name, inner in value.items() if inner is not None}
    return [_without_fillings(inner) for inner in value] if isinstance(value, list) else value


def _row(batch: pyarrow.RecordBatch, i: int, where: str) -> dict[str, JSONValue]:
    try:
        return batch.slice(i, 1).to_pylist()[0]
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where} holds a value that cannot be read ({reason(error)}); fix it") from error
