"""Reads calls of tools as models write them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megappo.errors import either, show
from megappo.observe.json_values import JSONValue

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# An unclosed string matches to the end of the text: searching again from each quote would take quadratic time.
_QUOTED_OR_CLOSE = re.compile(rf'"(?:[^"\\]|\\.)*+(?:"|\Z)|{_CLOSE}', re.DOTALL)
_DECODER = json.JSONDecoder(strict=False)
"""Decoder that finds where an object ends; it allows line breaks within strings."""


@dataclass(frozen=True)
class WantedCall:
    """A call of a tool that a model asks for."""

    tool: str
    arguments: dict[str, JSONValue] = field(default_factory=dict)
    problem: str = ""
    """Why the call cannot be made, in words for the model; "" where it can."""


def qwen_calls(text: str) -> list[WantedCall]:
    """Calls as Qwen 2.5 and 3 and Hermes write them: JSON with `name` and `arguments`, each call between <tool_call>
    tags."""
    return [_wanted(block, "arguments") for block, _, _ in _tagged(text)]


def qwen_prose(text: str) -> str:
    """The text around the calls."""
    end, around = 0, ""
    for _, start, stop in _tagged(text):
        around, end = around + text[end:start], stop
    return (around + text[end:]).strip()


def llama3_calls(text: str) -> list[WantedCall]:
    """Calls as Llama 3.1 to 3.3 write them: the whole reply is JSON with `name` and `parameters`; several are separated
    by `;`."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    return [_wanted(block, "parameters") for block in _objects(text)] if text.startswith("{") else []


@dataclass(frozen=True)
class CallFormat:
    """How a model family writes calls."""

    calls: Callable[[str], list[WantedCall]]
    """Reads the calls of a reply; there are none where it is an answer."""
    prose: Callable[[str], str]
    """Reads the text of a reply besides its calls."""


FORMATS = {
    "qwen": CallFormat(qwen_calls, qwen_prose),
    "llama3": CallFormat(llama3_calls, lambda text: ""),
}


def call_format(name: str, setting: str) -> CallFormat:
    """The format of this name; `setting` is named in the error. Raises ValueError where there is none."""
    if name not in FORMATS:
        raise ValueError(f"{setting} is {show(name)}, must be {either(FORMATS)}; change it")
    return FORMATS[name]


def _tagged(text: str) -> Iterator[tuple[str, int, int]]:
    """Contents between tags, each with start and end, tags included. Tags within strings of an object belong to it;
    where there is no object, the next closing tag ends it. Repeated tags count as one, and the last may be open."""
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
    """Position of the next closing tag, -1 where there is none. One outside of quoted strings is preferred, unless an
    opening tag stands before it."""
    unquoted = (found.start() for found in _QUOTED_OR_CLOSE.finditer(text, start) if found[0] == _CLOSE)
    if (first := next(unquoted, None)) is not None and _OPEN not in text[start:first]:
        return first
    return text.find(_CLOSE, start)


def _after(text: str, place: int, tag: str, most: int = sys.maxsize) -> tuple[int, int]:
    """Position after a tag and its repetitions from `place` on, spaces before each ignored, and their number."""
    count = 0
    while count < most and (found := text[place:].lstrip()).startswith(tag):
        place, count = len(text) - len(found) + len(tag), count + 1
    return place, count


def _object_end(text: str, start: int) -> int | None:
    """Position at which the JSON value ends that begins at `start`, spaces ignored; None where there is none."""
    start = len(text) - len(text[start:].lstrip())
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _objects(text: str) -> Iterator[str]:
    """The JSON objects of a text, one after another; a rest that is no JSON comes last."""
    while text:
        end = _object_end(text, 0)
        if end is None:
            yield text
            return
        yield text[:end]
        text = text[end:].lstrip("; \n").removeprefix("<|python_tag|>")


def _wanted(block: str, key: str) -> WantedCall:
    try:
        told = json.loads(block)
    except (ValueError, RecursionError) as error:
        return WantedCall("", problem=f"the call is no JSON ({error})")
    if not isinstance(told, dict) or not isinstance(told.get("name"), str):
        return WantedCall("", problem="the call has no name")
    arguments = told.get(key, {})
    if not isinstance(arguments, dict):
        return WantedCall(told["name"], problem=f"its {key} are no object")
    return WantedCall(told["name"], arguments)
