"""What agents ask and are told, whichever protocol they speak. Messages and tools have OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megappo.environments.chat import Message
from megappo.environments.tool_calls import WantedCall
from megappo.errors import show

Json = dict[str, Any]


class RefusedError(ValueError):
    """A request that cannot be answered, in words for who wrote the agent."""

    def __init__(self, problem: str, code: str = "invalid_value") -> None:
        super().__init__(problem)
        self.code = code
        """OpenAI's word for the kind of problem."""


@dataclass(frozen=True)
class Asked:
    """A conversation that the model is to go on with."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    model: str = ""
    """As the agent calls it; it has no say in which model answers."""
    stream_usage: bool = False


@dataclass(frozen=True)
class Said:
    """A turn of the model."""

    name: str
    """Unique within the episode."""
    text: str
    """Without special tokens, and without the calls."""
    calls: tuple[tuple[str, WantedCall], ...]
    """With the name of each."""
    truncated: bool
    prompt_tokens: int
    own_tokens: int

    @property
    def message(self) -> Message:
        """As the agent is to send it back."""
        calls = [called(name, call.tool, call.arguments) for name, call in self.calls]
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}


def called(name: str, tool: str, arguments: Mapping[str, Any]) -> Json:
    """A call of a message. Arguments are an object, as chat templates want them; over the wire OpenAI has a text."""
    return {"id": name, "type": "function", "function": {"name": tool, "arguments": dict(arguments)}}


def required(body: Mapping[str, Any], key: str, kind: type, word: str) -> Any:
    """A field that must be there. Raises RefusedError."""
    value = body.get(key)
    if not isinstance(value, kind):
        raise RefusedError(f"{key} is {show(value)}, must be {word}")
    return value


def listed(body: Mapping[str, Any], key: str) -> list[Any]:
    """A field that may be missing, else a list. Raises RefusedError."""
    return [] if body.get(key) is None else list(required(body, key, list, "a list"))


def whole(body: Mapping[str, Any], *keys: str) -> int | None:
    """The first of these fields that is there, a number of tokens. Raises RefusedError."""
    for key in keys:
        if (value := body.get(key)) is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RefusedError(f"{key} is {show(value)}, must be a whole number above 0")
            return value
    return None


def parts(content: object, where: str) -> Iterator[Json]:
    """The parts of a content, which may be a text, nothing, or a list. Raises RefusedError."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}
        return
    if not isinstance(content, Sequence) or not all(isinstance(part, dict) for part in content):
        raise RefusedError(f"{where} has the content {show(content)}, must be a text or a list of parts")
    yield from content


def text_of(content: object, where: str) -> str:
    """The text of a content. Raises RefusedError for anything but text, which the model does not read."""
    if content is None:
        return ""
    found = []
    for part in parts(content, where):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RefusedError(f"{where} has a part of type {show(part.get('type'))}; the model reads text alone")
        found.append(part["text"])
    return "".join(found)


def arguments_of(text: object, where: str) -> Json:
    """The arguments of a call from their JSON. Raises RefusedError."""
    try:
        found = json.loads(str(text) or "{}")
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{where} calls a tool with arguments that are no JSON ({error})") from error
    if not isinstance(found, dict):
        raise RefusedError(f"{where} calls a tool with {show(found)}, must be an object")
    return found


def refuse_unknown(body: Mapping[str, Any], refused: Mapping[str, Sequence[Any]]) -> None:
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
