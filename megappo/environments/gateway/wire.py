"""Protocol-independent requests of agents and answers. Messages and tools use the OpenAI format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megappo.environments.tools.tool_calls import WantedCall
from megappo.errors import show
from megappo.files.json_values import JSONValue
from megappo.models.tokens import Message, call_arguments

Json = dict[str, JSONValue]
T = TypeVar("T")


class RefusedError(ValueError):
    """A request that cannot be answered. The message is for the author of the agent."""


@dataclass(frozen=True)
class ChatRequest:
    """A request of an agent: a conversation that the model continues."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    model: str = ""
    """Model name in the request. The name does not select a model."""
    stream_usage: bool = False


@dataclass(frozen=True)
class AssistantTurn:
    """A turn of the model."""

    name: str
    """Id of the turn, unique within the episode."""
    text: str
    """Text of the turn, without special tokens and without the calls."""
    calls: tuple[tuple[str, WantedCall], ...]
    """Tool calls, each with its id."""
    truncated: bool
    prompt_tokens: int
    own_tokens: int

    @property
    def message(self) -> Message:
        """The turn as a message, in the form in which the agent returns it with the next request."""
        calls = [called(name, call.tool, call.arguments) for name, call in self.calls]
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}


def called(name: str, tool: str, arguments: Mapping[str, JSONValue]) -> Json:
    """Return a tool call within a message.

    The arguments are an object, because chat templates require an object. The OpenAI protocol uses JSON text.
    """
    return {"id": name, "type": "function", "function": {"name": tool, "arguments": dict(arguments)}}


def name_of(tool: Json) -> JSONValue:
    """Return the name of a tool that an agent offers."""
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def required(body: Mapping[str, JSONValue], key: str, kind: type[T], word: str) -> T:
    """Return the value of a required field. Raises RefusedError."""
    value = body.get(key)
    if not isinstance(value, kind):
        raise RefusedError(f"{key} is {show(value)}, must be {word}")
    return value


def listed(body: Mapping[str, JSONValue], key: str) -> list[JSONValue]:
    """Return the list in a field. Empty if the field is missing. Raises RefusedError."""
    return [] if body.get(key) is None else list(required(body, key, list, "a list"))


def whole(body: Mapping[str, JSONValue], *keys: str) -> int | None:
    """Return the number of tokens in the first present field, or None without such a field. Raises RefusedError."""
    for key in keys:
        if (value := body.get(key)) is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RefusedError(f"{key} is {show(value)}, must be a whole number above 0")
            return value
    return None


def parts(content: JSONValue, where: str) -> Iterator[Json]:
    """Yield the parts of a message's content, which may be text, empty, or a list. Raises RefusedError."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}
        return
    items = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if not isinstance(content, list) or len(items) < len(content):
        raise RefusedError(f"{where} has the content {show(content)}, must be a text or a list of parts")
    yield from items


def text_of(content: JSONValue, where: str) -> str:
    """Return the text of a message's content. Raises RefusedError for other content, which the model cannot read."""
    if content is None:
        return ""
    items = []
    for part in parts(content, where):
        text = part.get("text")
        if part.get("type") != "text" or not isinstance(text, str):
            raise RefusedError(f"{where} has a part of type {show(part.get('type'))}; the model reads text alone")
        items.append(text)
    return "".join(items)


def arguments_of(text: JSONValue, where: str) -> Json:
    """Return the arguments of a call, parsed from JSON. Raises RefusedError."""
    try:
        return call_arguments(text)
    except ValueError as error:
        raise RefusedError(f"{where} calls a tool with {error}") from error


def refuse_unknown(body: Mapping[str, JSONValue], refused: Mapping[str, Sequence[JSONValue]]) -> None:
    """Raise RefusedError if a field would change the answer and has no harmless value. None is always allowed."""
    for key, harmless in refused.items():
        value = body.get(key)
        if value is not None and value not in harmless:
            raise RefusedError(f"{key} is {show(value)}, which the model in training does not do; leave it out")


def event(data: Json | str, name: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
