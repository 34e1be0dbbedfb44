"""Anthropic's `POST /v1/messages`, in the form that its SDKs write and read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from megappo.environments.gateway.wire import (
    AssistantTurn,
    ChatRequest,
    Json,
    RefusedError,
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
from megappo.files.json_values import JSONValue
from megappo.models.tokens import Message

_REFUSED: dict[str, list[JSONValue]] = {
    "stop_sequences": [[]],
    "tool_choice": [{"type": "auto"}, {"type": "none"}],
    "thinking": [{"type": "disabled"}],
    "mcp_servers": [[]],
}
"""Fields that are refused unless they have one of these values, which change nothing.

A temperature is ignored, because the run determines sampling.
"""


def read_request(body: Mapping[str, JSONValue]) -> ChatRequest:
    """Read a request. Raises RefusedError."""
    refuse_unknown(body, _REFUSED)
    system = text_of(body.get("system"), "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(required(body, "messages", list, "a list of messages")):
        messages += _messages(message, f"message {number}")
    tools = [] if body.get("tool_choice") == {"type": "none"} else listed(body, "tools")
    return ChatRequest(
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
    """Yield messages in the OpenAI format. Tool results become separate messages before the text of the user."""
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


def answer(request: ChatRequest, turn: AssistantTurn) -> Json:
    """Return the answer as one JSON object."""
    return {
        **_head(request, turn),
        "content": list(_blocks(turn)),
        "stop_reason": _stop_reason(turn),
        "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": turn.own_tokens},
    }


def chunks(request: ChatRequest, turn: AssistantTurn) -> Iterator[bytes]:
    """Yield the answer as a stream of server-sent events, each block in one piece."""
    begun = {**_head(request, turn), "content": [], "stop_reason": None}
    usage = {"input_tokens": turn.prompt_tokens, "output_tokens": 1}
    yield _event("message_start", message=begun | {"usage": usage})
    for index, block in enumerate(_blocks(turn)):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            empty = block | {"input": {}}
        yield _event("content_block_start", index=index, content_block=empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": _stop_reason(turn), "stop_sequence": None}
    yield _event("message_delta", delta=ended, usage={"output_tokens": turn.own_tokens})
    yield _event("message_stop")


def error(message: str, kind: str, code: str) -> Json:
    """Return the body of an error response."""
    kind = {"authentication": "authentication_error", "server": "api_error"}.get(kind, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _event(kind: str, **fields: JSONValue) -> bytes:
    return event({"type": kind, **fields}, kind)


def _head(request: ChatRequest, turn: AssistantTurn) -> Json:
    head = {"id": f"msg_{turn.name}", "type": "message", "role": "assistant", "model": request.model}
    return {**head, "stop_sequence": None}


def _blocks(turn: AssistantTurn) -> Iterator[Json]:
    if turn.text:
        yield {"type": "text", "text": turn.text}
    for name, call in turn.calls:
        yield {"type": "tool_use", "id": name, "name": call.tool, "input": call.arguments}


def _stop_reason(turn: AssistantTurn) -> str:
    return "tool_use" if turn.calls else "max_tokens" if turn.truncated else "end_turn"
