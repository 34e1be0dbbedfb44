"""Records from files, reasoning-gym tasks and Python functions."""

from __future__ import annotations

import glob
import itertools
import math
import numbers
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megappo.config.sections.data import HUB_PREFIX, DataSourceSettings
from megappo.data.hub_sets import read_table
from megappo.data.prepare import SETS
from megappo.data.tables import json_lines, shown, table_rows
from megappo.errors import how_to_install, link_to_nothing, nearest_word
from megappo.files.json_values import JSONValue
from megappo.files.parquet_files import read_parquet
from megappo.models.tokens import Message, call_arguments
from megappo.plugins import check_call, is_import_path, load_function, users_code

if TYPE_CHECKING:
    import pyarrow

_ROLES = ("system", "user", "assistant", "tool")
_KEEP_PLAIN = "keep plain values in the record"
_NO_OPTIONS = "remove them, such as by the override data.train.options={}"

T = TypeVar("T")

Chat = Sequence[Message]


@dataclass(frozen=True)
class Record:
    """A prompt of a source."""

    prompt: str | Chat
    answer: str | None
    metadata: dict[str, Any]


Located = Iterator[tuple[str, Record]]
"""Records with their places for errors, such as `train.jsonl line 3`."""


def read_records(settings: DataSourceSettings) -> list[Record]:
    """Return at most `limit` records of a source, in order.

    Raises ValueError with the file, the line or row, and the problem.
    """
    records: list[Record] = []
    without: list[str] = []
    for place, record in itertools.islice(_open(settings), settings.limit):
        _check_sendable(record, place)
        records.append(record)
        without += [place] if record.answer is None else []
    if not records:
        raise ValueError(f"data source '{settings.source}' is empty; it needs at least one record")
    if 0 < len(without) < len(records) and not settings.source.startswith("reasoning_gym:"):
        raise ValueError(
            f"{without[0]} has no answer, like {len(without)} of {len(records)} records; add answers to all, or to none"
        )
    return records


def _open(settings: DataSourceSettings) -> Located:
    source = settings.source
    if source.startswith("reasoning_gym:"):
        return _reasoning_gym(source.removeprefix("reasoning_gym:"), settings.options)
    if source.startswith(HUB_PREFIX):
        if settings.options:
            raise ValueError(f"data source '{source}' takes no options, got {settings.options}; {_NO_OPTIONS}")
        return _keyed_rows(read_table(source, settings.limit), source, settings)
    if not source.endswith((".jsonl", ".parquet")):
        if is_import_path(source):
            return _python(source, settings.options)
        raise ValueError(
            f"data source '{source}' has an unknown type; "
            "use FILE.jsonl, FILE.parquet, datasets:NAME, reasoning_gym:TASK or package.module:function"
        )
    files = source_files(source)
    if settings.options:
        raise ValueError(
            f"data source '{source}' is a file and takes no options, got {settings.options}; {_NO_OPTIONS}"
        )
    read = _jsonl if source.endswith(".jsonl") else _parquet
    return itertools.chain.from_iterable(read(path, settings) for path in files)


def source_files(source: str) -> list[Path]:
    """Return the file of a name, or the files of a pattern such as `data/part-*.parquet`, sorted by name. Raises
    ValueError if no file exists."""
    if os.path.isdir(source):
        raise ValueError(f"data source '{source}' is a folder; name one file in it")
    if os.path.isfile(source):
        return [Path(source)]
    if glob.has_magic(source):
        files = [Path(path) for path in sorted(glob.glob(source, recursive=True)) if os.path.isfile(path)]
        if not files:
            raise ValueError(f"no file has a name like '{source}' (from {Path.cwd()}); change the pattern")
        return files
    if link := link_to_nothing(Path(source)):
        raise ValueError(f"data source '{source}': {link}")
    raise ValueError(f"data source '{source}' does not exist (from {Path.cwd()}); {_remedy_of(Path(source))}")


def _remedy_of(missing: Path) -> str:
    """Return the remedy for a missing file. For files of the shipped configurations, name the command that writes
    them."""
    splits = {f"{split.name}.parquet" for split in SETS.get(missing.parent.name, ())}
    if missing.name not in splits:
        return "check the path"
    return f"`megappo data prepare {missing.parent.name} {missing.parent}` writes it"


def _plain(mapping: Mapping[str, T]) -> dict[str, T]:
    """Return the mapping as a plain dict. Values are from `__getitem__`, which `dict` ignores for subclasses of
    dict."""
    return {name: mapping[name] for name in mapping}


def _check_sendable(record: Record, where: str) -> None:
    """Check that the metadata can be pickled for a reward worker, before the first step. Raises ValueError."""
    with users_code(f"{where}: the metadata cannot be sent to a reward worker", _KEEP_PLAIN):
        pickle.dumps(record.metadata)


def _checked_prompt(prompt: JSONValue, where: str) -> str | Chat:
    """Return a non-empty text, or chat messages without an answer of the assistant at the end."""
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{where}: the prompt is empty; remove the record")
        return checked_text(prompt, where, "prompt")
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{where}: the prompt is {shown(prompt)}, must be a text or a list of chat messages; fix it")
    with users_code(f"{where}: a chat message cannot be read", _KEEP_PLAIN):
        plain = [_plain(message) if isinstance(message, Mapping) else message for message in prompt]
    messages = [_checked_message(message, where) for message in plain]
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{where}: the last chat message is of the assistant, which the model must generate; remove it"
        )
    return messages


def _checked_message(message: JSONValue, where: str) -> dict[str, JSONValue]:
    if isinstance(message, dict) and (calls := message.get("tool_calls")):
        content = message.get("content")  # null in OpenAI's protocol for messages that only call tools
        parsed = [_checked_call(call, where) for call in calls] if isinstance(calls, list | tuple) else calls
        message = {**message, "content": "" if content is None else content, "tool_calls": parsed}
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise ValueError(f"{where}: chat message {shown(message)} must be an object with role and content; fix it")
    if message["role"] not in _ROLES:
        raise ValueError(f"{where}: chat role {shown(message['role'])} must be one of {', '.join(_ROLES)}; change it")
    if not isinstance(message["content"], str):
        raise ValueError(f"{where}: chat content {shown(message['content'])} must be a text; fix it")
    checked_text(message["content"], where, "prompt")
    return {key: value for key, value in message.items() if value is not None}


def _checked_call(call: Any, where: str) -> JSONValue:
    """Return a tool call with an object as arguments. The arguments may be JSON text."""
    with users_code(f"{where}: a tool call cannot be read", _KEEP_PLAIN):
        plain = _plain(call) if isinstance(call, Mapping) else call
    if not isinstance(plain, dict):
        raise ValueError(f"{where}: the tool call {shown(call)} must be an object; fix it")
    if isinstance(plain.get("function"), Mapping):
        return {**plain, "function": _checked_call(plain["function"], where)}
    if plain.get("arguments") is None:
        return plain
    try:
        return {**plain, "arguments": call_arguments(plain["arguments"])}
    except ValueError as error:
        raise ValueError(f"{where}: a chat message calls a tool with {error}; fix it") from error


def checked_text(text: str, where: str, name: str) -> str:
    """Return the text. Raises ValueError if the text contains half of a surrogate pair. JSON can escape surrogates, but
    tokenizers and logs fail."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: the {name} contains half a surrogate pair ({error.reason}); fix the text"
        ) from error
    return text


def _checked_answer(answer: Any, where: str) -> str | None:
    if answer is None:
        return None
    if isinstance(answer, str):
        return checked_text(answer, where, "answer")
    is_number = isinstance(answer, numbers.Real) and not isinstance(answer, bool)  # includes numbers of numpy
    with users_code(f"{where}: the answer cannot be written as a text", _KEEP_PLAIN):
        if is_number and (isinstance(answer, numbers.Rational) or math.isfinite(answer)):
            return str(answer)
    raise ValueError(f"{where}: the answer is {shown(answer)}, must be a text or a finite number; fix it")


def _jsonl(path: Path, settings: DataSourceSettings) -> Located:
    for where, fields in json_lines(path):
        yield where, _keyed_record(fields, where, settings)


def _keyed_record(fields: dict[str, JSONValue], where: str, settings: DataSourceSettings) -> Record:
    """Return a record with the prompt and the answer from the keys of the source."""
    if settings.prompt_key not in fields:
        near = nearest_word(settings.prompt_key, fields, cutoff=0.5)
        hint = f"'{near}'" if near else ", ".join(fields) or "none at all"
        raise ValueError(f"{where} has no field '{settings.prompt_key}', but {hint}; set the source's prompt_key")
    rest = {k: v for k, v in fields.items() if k not in (settings.prompt_key, settings.answer_key)}
    prompt = _checked_prompt(fields[settings.prompt_key], where)
    return Record(prompt, _checked_answer(fields.get(settings.answer_key), where), rest)


def _keyed_rows(table: pyarrow.Table, place: str | Path, settings: DataSourceSettings) -> Located:
    for where, row in table_rows(table, place):
        fields = {name: value for name, value in row.items() if value is not None or name == settings.prompt_key}
        yield where, _keyed_record(fields, where, settings)


def _parquet(path: Path, settings: DataSourceSettings) -> Located:
    """Yield the records of a parquet file in verl's schema: data_source, prompt (chat messages),
    reward_model.ground_truth and extra_info. In a table without reward_model, or for a source with an explicit
    answer_key, answers are in a column, as in JSON lines."""
    table = read_parquet(path)
    columns, default = set(table.column_names), DataSourceSettings.model_fields["answer_key"].default
    # Saved settings contain all keys, so the default does not count as explicit.
    has_key = settings.answer_key != default
    if has_key and settings.answer_key not in columns:
        near = nearest_word(settings.answer_key, sorted(columns))
        raise ValueError(f"{path} has no column '{settings.answer_key}', but '{near}'; set the source's answer_key")
    if has_key or "reward_model" not in columns:
        yield from _keyed_rows(table, path, settings)
        return
    missing = {"data_source", settings.prompt_key} - columns
    if missing:
        raise ValueError(
            f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(sorted(missing))}; "
            "write verl's schema (data_source, prompt, reward_model and extra_info), or set prompt_key and answer_key"
        )
    for where, row in table_rows(table, path):
        yield where, _parquet_record(row, where, settings.prompt_key)


def _parquet_record(row: dict[str, JSONValue], where: str, prompt_key: str) -> Record:
    reward, extra = row["reward_model"], row.get("extra_info")
    if not isinstance(reward, dict) or reward.get("ground_truth") is None:
        raise ValueError(f"{where} has no reward_model.ground_truth; add it")
    if extra is not None and not isinstance(extra, dict):
        raise ValueError(f"{where}: extra_info is {shown(extra)}, must be a struct; write verl's schema")
    metadata = {**(extra or {}), "data_source": row["data_source"]}
    return Record(_checked_prompt(row[prompt_key], where), _checked_answer(reward["ground_truth"], where), metadata)


def _reasoning_gym(task: str, options: dict[str, JSONValue]) -> Located:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"reasoning-gym tasks need a library; {how_to_install('tasks')}") from error
    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task '{task}'; did you mean '{nearest_word(task, DATASETS)}'?")
    options = {"seed": 0, **options}  # the default is a random seed, with different prompts on each rank
    for name in ("seed", "size"):
        value = options.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"option {name} of reasoning_gym:{task} is {value!r}, must be a whole number; set one")
    for number, entry in enumerate(_entries(task, options)):
        where = f"reasoning_gym:{task} record {number}"
        answer = None if entry["answer"] is None else str(entry["answer"])
        metadata = {"task": task, "options": options, "entry": entry}
        yield where, Record(_checked_prompt(entry["question"], where), answer, metadata)


def _entries(task: str, options: Mapping[str, JSONValue]) -> Iterator[dict[str, JSONValue]]:
    """Yield the entries of a task. Errors of the task become ValueErrors with one sentence."""
    import reasoning_gym

    with users_code(f"reasoning-gym task '{task}' refuses the options {options}", "fix them"):
        dataset = reasoning_gym.create_dataset(task, **options)
        yield from (dataset[number] for number in range(len(dataset)))


def _python(path: str, options: Mapping[str, JSONValue]) -> Located:
    function = load_function(path, "data source")
    check_call(function, (), options, what=f"data source '{path}'", remedy="change its options")
    for number, fields in enumerate(_produced(function, path, options)):
        where = f"{path} record {number}"
        yield where, _python_record(fields, where)


def _python_record(fields: Any, where: str) -> Record:
    """Return a record in plain types. Only the fields prompt, answer and metadata are read."""
    values: dict[str, Any] = {}
    if isinstance(fields, Mapping):
        with users_code(f"{where} cannot be read", _KEEP_PLAIN):
            values = {name: fields[name] for name in ("prompt", "answer", "metadata") if name in fields}
    if "prompt" not in values:
        raise ValueError(
            f"{where} is {shown(fields)}, must be a mapping with prompt, answer and optional metadata; fix it"
        )
    metadata = values.get("metadata")
    with users_code(f"{where}: the metadata cannot be read", _KEEP_PLAIN):
        metadata = _plain(metadata) if isinstance(metadata, Mapping) else metadata or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{where}: the metadata are {shown(metadata)}, must be a mapping; fix them")
    return Record(_checked_prompt(values["prompt"], where), _checked_answer(values.get("answer"), where), metadata)


def _produced(function: Callable[..., Iterable[T]], path: str, options: Mapping[str, JSONValue]) -> Iterator[T]:
    """Yield the items of a custom function. Exceptions of the function become ValueErrors with one sentence."""
    with users_code(f"data source '{path}' failed", "fix the function or its options"):
        yield from function(**options)
