"""Anthropic's `POST /v1/messages`, as its SDKs write and read it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from megappo.config.tokens import Message
from megappo.environments.gateway.wire import (
    Asked,
    Json,
    RefusedError,
    Said,
    called,
    event,
    listed,
    parts,
    refuse_unknown,
    required,
    text_of,
    whole,
)
from megappo.errors import show
from megappo.observe.json_values import JSONValue

_REFUSED: dict[str, list[JSONValue]] = {
    "stop_sequences": [[]],
    "tool_choice": [{"type": "auto"}, {"type": "none"}],
    "thinking": [{"type": "disabled"}],
    "mcp_servers": [[]],
}
"""Fields that are refused unless they have one of these values, which change nothing. A temperature is ignored: the run
decides it."""


def asked(body: Mapping[str, JSONValue]) -> Asked:
    """Read a request. Raises RefusedError."""
    refuse_unknown(body, _REFUSED)
    system = text_of(body.get("system"), "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(required(body, "messages", list, "a list of messages")):
        messages += _messages(message, f"message {number}")
    tools = [] if body.get("tool_choice") == {"type": "none"} else listed(body, "tools")
    return Asked(
        tuple(messages),
        tuple(map(_tool, tools)),
        whole(body, "max_tokens"),
        stream=bool(body.get("stream")),
        model=str(body.get("model", "")),
    )


def _tool(tool: JSONValue) -> Json:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
        raise RefusedError(f"a tool is {show(tool)}, must have a name and an input_schema")
    known = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
    return {"type": "function", "function": known | {"parameters": tool["input_schema"]}}


def _messages(message: JSONValue, where: str) -> Iterator[Message]:
    """Messages in OpenAI's form, in which results of tools are messages of their own before the user's text."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or role not in ("user", "assistant", "system"):
        raise RefusedError(f"{where} is {show(message)}, must have the role user or assistant")
    texts: list[str] = []
    calls: list[Json] = []
    for part in parts(message.get("content"), where):
        match part:
            case {"type": "tool_use", "id": str(name), "name": str(tool), "input": dict(arguments)}:
                calls.append(called(name, tool, arguments))
            case {"type": "tool_result", "tool_use_id": str(name)}:
                yield {"role": "tool", "content": text_of(part.get("content"), where), "tool_call_id": name}
            case _:
                texts.append(text_of([part], where))
    if texts or calls or role == "assistant":
        yield {"role": role, "content": "".join(texts), **({"tool_calls": calls} if calls else {})}


def answer(asked: Asked, said: Said) -> Json:
    """The answer as one JSON object."""
    return {
        **_head(asked, said),
        "content": list(_blocks(said)),
        "stop_reason": _stop_reason(said),
        "usage": {"input_tokens": said.prompt_tokens, "output_tokens": said.own_tokens},
    }


def chunks(asked: Asked, said: Said) -> Iterator[bytes]:
    """The answer as a stream of server-sent events, each block in one piece."""
    begun = {**_head(asked, said), "content": [], "stop_reason": None}
    usage = {"input_tokens": said.prompt_tokens, "output_tokens": 1}
    yield _event("message_start", message=begun | {"usage": usage})
    for index, block in enumerate(_blocks(said)):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            empty = block | {"input": {}}
        yield _event("content_block_start", index=index, content_block=empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": _stop_reason(said), "stop_sequence": None}
    yield _event("message_delta", delta=ended, usage={"output_tokens": said.own_tokens})
    yield _event("message_stop")


def error(message: str, kind: str, code: str) -> Json:
    """Body of an error response."""
    kind = {"authentication": "authentication_error", "server": "api_error"}.get(kind, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _event(kind: str, **told: JSONValue) -> bytes:
    return event({"type": kind, **told}, kind)


def _head(asked: Asked, said: Said) -> Json:
    head = {"id": f"msg_{said.name}", "type": "message", "role": "assistant", "model": asked.model}
    return {**head, "stop_sequence": None}


def _blocks(said: Said) -> Iterator[Json]:
    if said.text:
        yield {"type": "text", "text": said.text}
    for name, call in said.calls:
        yield {"type": "tool_use", "id": name, "name": call.tool, "input": call.arguments}


def _stop_reason(said: Said) -> str:
    return "tool_use" if said.calls else "max_tokens" if said.truncated else "end_turn"
