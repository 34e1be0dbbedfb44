"""Calls of tools as models write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megappo.errors import either, show

_QWEN = r"<tool_call>(.*?)(?:</tool_call>|$)"


@dataclass(frozen=True)
class WantedCall:
    """A call that a model asks for."""

    tool: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why it is none; for the model to read."""


def qwen_calls(text: str) -> list[WantedCall]:
    """Of Qwen 2.5 and 3, and of Hermes: JSON with `name` and `arguments`, each call between <tool_call> tags."""
    blocks = re.findall(_QWEN, text, re.DOTALL)
    return [_wanted(block, "arguments") for block in blocks]


def llama3_calls(text: str) -> list[WantedCall]:
    """Of Llama 3.1 to 3.3: the whole reply is JSON with `name` and `parameters`; several are separated by `;`."""
    text = text.removeprefix("<|python_tag|>").strip()
    return [_wanted(block, "parameters") for block in _objects(text)] if text.startswith("{") else []


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls."""

    calls: Callable[[str], list[WantedCall]]
    """Those of a reply, none where it is an answer."""
    words: Callable[[str], str]
    """What a reply with calls says besides."""


FORMATS = {
    "qwen": CallFormat(qwen_calls, lambda text: re.sub(_QWEN, "", text, flags=re.DOTALL).strip()),
    "llama3": CallFormat(llama3_calls, lambda text: ""),
}


def call_format(name: str, setting: str) -> CallFormat:
    """The format of this name; `setting` says who wants it. Raises ValueError where there is none."""
    if name not in FORMATS:
        raise ValueError(f"{setting} is {show(name)}, must be {either(FORMATS)}; change it")
    return FORMATS[name]


def _objects(text: str) -> Iterator[str]:
    """The JSON objects of a text one after another; what is none comes as the last."""
    decoder = json.JSONDecoder()
    while text:
        try:
            _, end = decoder.raw_decode(text)
        except ValueError:
            yield text
            return
        yield text[:end]
        text = text[end:].lstrip("; \n")


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
