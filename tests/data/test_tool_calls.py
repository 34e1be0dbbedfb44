"""Tool calls in previous turns of prompts, with arguments as objects or JSON text, from each kind of source."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pyarrow
import pytest
from pyarrow import parquet

from megappo.config.data import DataSourceSettings
from megappo.data.sources import Record, read_records
from tests.support import data as helpers_data

ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Rome"}, {"a": 1, "deep": {"x": [1, 2]}}, {"items": [{"k": 1}, {"l": [{"m": 2}]}]}, {},
]  # fmt: skip
"""Arguments of calls. All arguments have different fields."""


def read(source: str | Path) -> list[Record]:
    return read_records(DataSourceSettings(source=str(source)))


def jsonl(folder: Path, *records: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def row_of(arguments: Any, content: str | None) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    user, result = {"role": "user", "content": "look"}, {"role": "tool", "content": "12", "name": "look"}
    return {"prompt": [user, {"role": "assistant", "content": content, "tool_calls": [call]}, result], "answer": "1"}


@pytest.mark.parametrize("kind", ["lines", "table", "verl", "datasets", "function"])
def test_text_arguments_equal_object_arguments(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates would quote text again. In the protocol of OpenAI such a message has no content."""
    expected = [record.prompt for record in read(jsonl(tmp_path, *(row_of(arguments, "") for arguments in ARGUMENTS)))]
    texts = [row_of(json.dumps(arguments), None) for arguments in ARGUMENTS]
    table = pyarrow.Table.from_pylist(texts)
    source: Any = tmp_path / f"{kind}.parquet"
    match kind:
        case "lines":
            source = jsonl(tmp_path, *texts)
        case "table":
            parquet.write_table(table, source)
        case "verl":
            rows = [
                {"data_source": "d", "prompt": row["prompt"], "reward_model": {"ground_truth": "1"}} for row in texts
            ]
            parquet.write_table(pyarrow.Table.from_pylist(rows), source)
        case "datasets":
            library = pytest.importorskip("datasets")
            library.Dataset(table).save_to_disk(tmp_path / "saved")
            source = f"datasets:{tmp_path}/saved"
        case "function":
            monkeypatch.setattr(helpers_data, "CHATS", texts, raising=False)
            source = "tests.support.data:chats"
    assert [record.prompt for record in read(source)] == expected


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ({"function": {"name": "f", "arguments": '{"b": [1, null], "a": "\\u00e9"}'}}, {"b": [1, None], "a": "é"}),
        ({"name": "f", "arguments": '{"x": 1}'}, {"x": 1}),
        ({"function": {"name": "f", "arguments": ""}}, {}),
        ({"function": {"name": "f"}}, None),
    ],
)
def test_arguments_of_calls_are_read(tmp_path: Path, call: dict[str, Any], arguments: Any) -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": [call]}
    [record] = read(jsonl(tmp_path, {"prompt": [message, {"role": "tool", "content": "r"}]}))
    [call_read] = cast(Any, record.prompt[0])["tool_calls"]
    assert call_read.get("function", call_read).get("arguments") == arguments


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ('{"city": ', r"line 1: a chat message calls a tool with arguments that are no JSON \(Expecting value"),
        ("[1]", r"a tool with the arguments \[1\], must be an object; fix it"),
        ([1], r"a tool with the arguments \[1\], must be an object; fix it"),
        ('"Rome"', r"a tool with the arguments 'Rome', must be an object; fix it"),
        ("[" * 100_000, "arguments that are no JSON"),
        ('{"a": "\\ud83d"}', ""),
    ],
)
def test_invalid_arguments_are_rejected(tmp_path: Path, arguments: Any, sentence: str) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    path = jsonl(tmp_path, {"prompt": [message, {"role": "tool", "content": "r"}]})
    with pytest.raises(ValueError, match=sentence) if sentence else nullcontext():
        read(path)


def test_invalid_calls_are_rejected(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": ["look"]}
    with pytest.raises(ValueError, match="the tool call 'look' must be an object; fix it"):
        read(jsonl(tmp_path, {"prompt": [message, {"role": "tool", "content": "r"}]}))
