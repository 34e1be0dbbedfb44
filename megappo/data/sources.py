"""Records from files, reasoning-gym tasks and Python functions."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.config.schema import DataSourceSettings
from megappo.rewards.registry import load_function

_ROLES = ("system", "user", "assistant", "tool")

Chat = list[dict[str, str]]


@dataclass(frozen=True)
class Record:
    """One prompt as its source gave it."""

    prompt: str | Chat
    answer: str | None
    metadata: dict[str, Any]


def read_records(settings: DataSourceSettings) -> list[Record]:
    """All records of a source, in its order.

    Raises ValueError naming the file and line (or row) and what is wrong with it.
    """
    source = settings.source
    if source.startswith("reasoning_gym:"):
        records = _reasoning_gym(source.removeprefix("reasoning_gym:"), settings.options)
    elif source.startswith("python:"):
        records = _python(source.removeprefix("python:"), settings.options)
    elif source.endswith(".jsonl"):
        records = _jsonl(Path(source), settings)
    elif source.endswith(".parquet"):
        records = _parquet(Path(source))
    else:
        raise ValueError(
            f"data source '{source}' is of no known kind; "
            "use FILE.jsonl, FILE.parquet, reasoning_gym:TASK or python:package.module:function"
        )
    found: list[Record] = []
    for record in records:
        found.append(record)
        if len(found) == settings.limit:
            break
    if not found:
        raise ValueError(f"data source '{source}' is empty; it needs at least one record")
    without = sum(r.answer is None for r in found)
    if 0 < without < len(found):
        raise ValueError(
            f"{without} of {len(found)} records of '{source}' have no answer; give all of them one, or none"
        )
    return found


def _checked_prompt(prompt: Any, where: str) -> str | Chat:
    """A non-empty string, or chat messages."""
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{where}: the prompt is empty; remove the record")
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{where}: the prompt is {prompt!r}, must be a text or a list of chat messages")
    for message in prompt:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(f"{where}: chat message {message!r} must be an object with role and content")
        if message["role"] not in _ROLES:
            raise ValueError(f"{where}: chat role '{message['role']}' is not one of {', '.join(_ROLES)}")
        if not isinstance(message["content"], str):
            raise ValueError(f"{where}: chat content {message['content']!r} must be a text")
    return [{"role": m["role"], "content": m["content"]} for m in prompt]


def _checked_answer(answer: Any, where: str) -> str | None:
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return str(answer)
    raise ValueError(f"{where}: the answer is {answer!r}, must be a text or a number")


def _jsonl(path: Path, settings: DataSourceSettings) -> Iterator[Record]:
    for number, line in enumerate(_lines(path), start=1):
        where = f"{path} line {number}"
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON ({error.msg} at column {error.colno}); mend or remove it") from error
        if not isinstance(fields, dict):
            raise ValueError(f'{where} holds {type(fields).__name__}, must be an object like {{"prompt": ...}}')
        if settings.prompt_key not in fields:
            near = difflib.get_close_matches(settings.prompt_key, fields, n=1, cutoff=0.5)
            hint = f"'{near[0]}'" if near else f"one of {', '.join(fields) or 'none'}"
            raise ValueError(f"{where} has no field '{settings.prompt_key}' but {hint}; set data.train.prompt_key")
        rest = {k: v for k, v in fields.items() if k not in (settings.prompt_key, settings.answer_key)}
        yield Record(
            _checked_prompt(fields[settings.prompt_key], where),
            _checked_answer(fields.get(settings.answer_key), where),
            rest,
        )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode("utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"data file {path} cannot be read ({error.strerror}); check data.*.source") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path} line {line} is not UTF-8; convert the file") from error


def _parquet(path: Path) -> Iterator[Record]:
    """verl's schema: data_source, prompt (chat messages), reward_model.ground_truth, extra_info."""
    import pyarrow
    from pyarrow import parquet

    if not path.exists():
        raise ValueError(f"data file {path} does not exist; check data.*.source")
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).split(".")[0]
        raise ValueError(f"{path} is not a readable parquet file ({reason}); write it again") from error
    missing = {"data_source", "prompt", "reward_model"} - set(table.column_names)
    if missing:
        raise ValueError(
            f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(sorted(missing))}; "
            "verl's schema has data_source, prompt, reward_model and extra_info"
        )
    for number, row in enumerate(table.to_pylist()):
        where = f"{path} row {number}"
        reward = row["reward_model"]
        if not isinstance(reward, dict) or reward.get("ground_truth") is None:
            raise ValueError(f"{where} has no reward_model.ground_truth; add it")
        metadata = {"data_source": row["data_source"], **(row.get("extra_info") or {})}
        yield Record(_checked_prompt(row["prompt"], where), _checked_answer(reward["ground_truth"], where), metadata)


def _reasoning_gym(task: str, options: dict[str, Any]) -> Iterator[Record]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError("reasoning-gym tasks need a library; pip install 'megappo[tasks]'") from error
    if task not in DATASETS:
        nearest = difflib.get_close_matches(task, DATASETS, n=1, cutoff=0.0)[0]
        raise ValueError(f"reasoning-gym has no task '{task}'; did you mean '{nearest}'?")
    try:
        dataset = reasoning_gym.create_dataset(task, **options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym task '{task}' refuses its options {options}: {error}") from error
    for entry in dataset:
        yield Record(entry["question"], str(entry["answer"]), {"task": task, "entry": entry})


def _python(path: str, options: dict[str, Any]) -> Iterator[Record]:
    function = load_function(path, "data source")
    try:
        produced = iter(function(**options))
    except TypeError as error:
        raise ValueError(f"data source 'python:{path}' cannot be called with options {options}: {error}") from error
    for number, fields in enumerate(produced):
        where = f"python:{path} record {number}"
        if not isinstance(fields, Mapping) or "prompt" not in fields:
            raise ValueError(f"{where} is {fields!r}, must be a mapping with prompt, answer and perhaps metadata")
        yield Record(
            _checked_prompt(fields["prompt"], where),
            _checked_answer(fields.get("answer"), where),
            dict(fields.get("metadata") or {}),
        )
