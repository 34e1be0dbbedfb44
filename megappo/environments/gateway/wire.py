"""Requests of agents and answers to them, whichever protocol they speak. Messages and tools have OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megappo.config.tokens import Message, call_arguments
from megappo.environments.tool_calls import WantedCall
from megappo.errors import show
from megappo.observe.json_values import JSONValue

Json = dict[str, JSONValue]
T = TypeVar("T")


class RefusedError(ValueError):
    """A request that cannot be answered; the message is for whoever wrote the agent."""


@dataclass(frozen=True)
class Asked:
    """A request of an agent: a conversation that the model is to continue."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    model: str = ""
    """Model name that the agent sent; it does not choose which model answers."""
    stream_usage: bool = False


@dataclass(frozen=True)
class Said:
    """A turn of the model."""

    name: str
    """Id of the turn, unique within the episode."""
    text: str
    """Text of the turn, without special tokens and without the calls."""
    calls: tuple[tuple[str, WantedCall], ...]
    """Calls of tools, each with its id."""
    truncated: bool
    prompt_tokens: int
    own_tokens: int

    @property
    def message(self) -> Message:
        """The turn as a message, as the agent sends it back with its next request."""
        calls = [called(name, call.tool, call.arguments) for name, call in self.calls]
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}


def called(name: str, tool: str, arguments: Mapping[str, JSONValue]) -> Json:
    """A tool call within a message. Its arguments are an object, as chat templates need them; OpenAI's protocol has
    JSON text there."""
    return {"id": name, "type": "function", "function": {"name": tool, "arguments": dict(arguments)}}


def name_of(tool: Json) -> JSONValue:
    """The name of a tool that an agent offers."""
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def required(body: Mapping[str, JSONValue], key: str, kind: type[T], word: str) -> T:
    """The value of a required field. Raises RefusedError."""
    value = body.get(key)
    if not isinstance(value, kind):
        raise RefusedError(f"{key} is {show(value)}, must be {word}")
    return value


def listed(body: Mapping[str, JSONValue], key: str) -> list[JSONValue]:
    """The list in a field; empty where the field is missing. Raises RefusedError."""
    return [] if body.get(key) is None else list(required(body, key, list, "a list"))


def whole(body: Mapping[str, JSONValue], *keys: str) -> int | None:
    """The number of tokens in the first of these fields that is present; None: none is. Raises RefusedError."""
    for key in keys:
        if (value := body.get(key)) is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RefusedError(f"{key} is {show(value)}, must be a whole number above 0")
            return value
    return None


def parts(content: JSONValue, where: str) -> Iterator[Json]:
    """The parts of a message's content, which may be text, nothing, or a list. Raises RefusedError."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}
        return
    found = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if not isinstance(content, list) or len(found) < len(content):
        raise RefusedError(f"{where} has the content {show(content)}, must be a text or a list of parts")
    yield from found


def text_of(content: JSONValue, where: str) -> str:
    """The text of a message's content. Raises RefusedError for anything but text, which is all that the model reads."""
    if content is None:
        return ""
    found = []
    for part in parts(content, where):
        text = part.get("text")
        if part.get("type") != "text" or not isinstance(text, str):
            raise RefusedError(f"{where} has a part of type {show(part.get('type'))}; the model reads text alone")
        found.append(text)
    return "".join(found)


def arguments_of(text: JSONValue, where: str) -> Json:
    """The arguments of a call, parsed from JSON. Raises RefusedError."""
    try:
        return call_arguments(text)
    except ValueError as error:
        raise RefusedError(f"{where} calls a tool with {error}") from error


def refuse_unknown(body: Mapping[str, JSONValue], refused: Mapping[str, Sequence[JSONValue]]) -> None:
    """Raise RefusedError for a field that would change the answer and has another value than these; None is always
    fine."""
    for key, harmless in refused.items():
        value = body.get(key)
        if value is not None and value not in harmless:
            raise RefusedError(f"{key} is {show(value)}, which the model in training does not do; leave it out")


def event(data: Json | str, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
