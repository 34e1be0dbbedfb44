"""Parsing of tool calls in the text of a model."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megappo.errors import either, show
from megappo.files.json_values import JSONValue

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# An unclosed string matches to the end of the text. Searching again from each quote would take quadratic time.
_QUOTED_OR_CLOSE = re.compile(rf'"(?:[^"\\]|\\.)*+(?:"|\Z)|{_CLOSE}', re.DOTALL)
_DECODER = json.JSONDecoder(strict=False)
"""Decoder that finds the end of an object. Line breaks within strings are allowed."""


@dataclass(frozen=True)
class WantedCall:
    """A tool call in the text of a model."""

    tool: str
    arguments: dict[str, JSONValue] = field(default_factory=dict)
    problem: str = ""
    """Reason for the model why the call cannot be made, or ""."""


def qwen_calls(text: str) -> list[WantedCall]:
    """Return the calls of Qwen 2.5, Qwen 3 and Hermes: JSON with `name` and `arguments` between <tool_call> tags."""
    return [_parsed_call(block, "arguments") for block, _, _ in _tagged(text)]


def qwen_prose(text: str) -> str:
    """Return the text around the calls."""
    end, around = 0, ""
    for _, start, stop in _tagged(text):
        around, end = around + text[end:start], stop
    return (around + text[end:]).strip()


def llama3_calls(text: str) -> list[WantedCall]:
    """Return the calls of Llama 3.1 to 3.3: the whole reply is JSON with `name` and `parameters`.

    Several calls are separated by `;`.
    """
    text = text.strip().removeprefix("<|python_tag|>").strip()
    return [_parsed_call(block, "parameters") for block in _objects(text)] if text.startswith("{") else []


@dataclass(frozen=True)
class CallFormat:
    """Call format of a model family."""

    calls: Callable[[str], list[WantedCall]]
    """Parses the calls of a reply. An answer contains no calls."""
    prose: Callable[[str], str]
    """Parses the text of a reply without its calls."""


FORMATS = {
    "qwen": CallFormat(qwen_calls, qwen_prose),
    "llama3": CallFormat(llama3_calls, lambda text: ""),
}


def call_format(name: str, setting: str) -> CallFormat:
    """Return the format of this name. Raises ValueError, with the name of the `setting`, if the format does not
    exist."""
    if name not in FORMATS:
        raise ValueError(f"{setting} is {show(name)}, must be {either(FORMATS)}; change it")
    return FORMATS[name]


def _tagged(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the contents between tags, each with start and end including the tags.

    Tags within strings of an object belong to the object. Without an object, the next closing tag ends the contents.
    Repeated tags count as one. The last tag may be unclosed.
    """
    start = text.find(_OPEN)
    while start >= 0:
        first, depth = _after(text, start, _OPEN)
        end = _object_end(text, first) or first
        closed = text[end:].lstrip().startswith((_CLOSE, _OPEN)) or not text[end:].strip()
        if end == first or not closed:
            end = _next_close(text, end)
        block = text[first:end] if end >= 0 else text[first:]
        stop = _after(text, end, _CLOSE, depth)[0] if end >= 0 else len(text)
        yield block, start, stop
        start = text.find(_OPEN, stop)


def _next_close(text: str, start: int) -> int:
    """Return the position of the next closing tag, or -1.

    A closing tag outside quoted strings is preferred, unless an opening tag precedes it.
    """
    unquoted = (match.start() for match in _QUOTED_OR_CLOSE.finditer(text, start) if match[0] == _CLOSE)
    if (first := next(unquoted, None)) is not None and _OPEN not in text[start:first]:
        return first
    return text.find(_CLOSE, start)


def _after(text: str, place: int, tag: str, most: int = sys.maxsize) -> tuple[int, int]:
    """Return the position after a tag and its repetitions from `place` on, and their number.

    Whitespace before each tag is ignored.
    """
    count = 0
    while count < most and (rest := text[place:].lstrip()).startswith(tag):
        place, count = len(text) - len(rest) + len(tag), count + 1
    return place, count


def _object_end(text: str, start: int) -> int | None:
    """Return the end of the JSON value at `start`, or None without a JSON value. Leading whitespace is ignored."""
    start = len(text) - len(text[start:].lstrip())
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _objects(text: str) -> Iterator[str]:
    """Yield the JSON objects of a text in order. Remaining text that is not JSON comes last."""
    while text:
        end = _object_end(text, 0)
        if end is None:
            yield text
            return
        yield text[:end]
        text = text[end:].lstrip("; \n").removeprefix("<|python_tag|>")


def _parsed_call(block: str, key: str) -> WantedCall:
    try:
        value = json.loads(block)
    except (ValueError, RecursionError) as error:
        return WantedCall("", problem=f"the call is no JSON ({error})")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return WantedCall("", problem="the call has no name")
    arguments = value.get(key, {})
    if not isinstance(arguments, dict):
        return WantedCall(value["name"], problem=f"its {key} are no object")
    return WantedCall(value["name"], arguments)
