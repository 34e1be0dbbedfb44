"""OpenAI's `POST /v1/chat/completions`, in the form that its SDKs write and read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from megappo.environments.gateway.wire import (
    AssistantTurn,
    ChatRequest,
    Json,
    RefusedError,
    arguments_of,
    called,
    event,
    listed,
    refuse_unknown,
    required,
    text_of,
    whole,
)
from megappo.errors import show
from megappo.files.json_values import JSONValue
from megappo.models.tokens import Message

_REFUSED: dict[str, list[JSONValue]] = {
    "n": [1],
    "stop": [[]],
    "response_format": [{"type": "text"}],
    "logprobs": [False],
    "top_logprobs": [0],
    "tool_choice": ["auto", "none"],
    "functions": [[]],
    "logit_bias": [{}],
    "modalities": [["text"]],
}
"""Fields that are refused unless they have one of these values, which change nothing.

A seed, a temperature and penalties are ignored, because the run determines sampling.
"""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_request(body: Mapping[str, JSONValue]) -> ChatRequest:
    """Read a request. Raises RefusedError."""
    refuse_unknown(body, _REFUSED)
    messages = required(body, "messages", list, "a list of messages")
    options = body.get("stream_options")
    return ChatRequest(
        tuple(_message(message, number) for number, message in enumerate(messages)),
        () if body.get("tool_choice") == "none" else tuple(map(_tool, listed(body, "tools"))),
        whole(body, "max_completion_tokens", "max_tokens"),
        stream=bool(body.get("stream")),
        model=str(body.get("model", "")),
        stream_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _tool(tool: JSONValue) -> Json:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedError(f"a tool is {show(tool)}, must be a function with a name")
    known = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
    return {"type": "function", "function": known}


def _message(message: JSONValue, number: int) -> Message:
    """Return the fields of a message that a chat template reads.

    SDKs may add or omit fields when they return an answer.
    """
    where = f"message {number}"
    role = _ROLES.get(str(message.get("role"))) if isinstance(message, dict) else None
    if not isinstance(message, dict) or role is None:
        raise RefusedError(f"{where} is {show(message)}, must have the role {', '.join(_ROLES)}")
    fields: Json = {"role": role, "content": text_of(message.get("content"), where)}
    if calls := listed(message, "tool_calls"):
        fields["tool_calls"] = [_call(call, where) for call in calls]
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            fields[key] = message[key]
    return fields


def _call(call: JSONValue, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RefusedError(f"{where} has the call {show(call)}, must be of a function")
    return called(str(call.get("id")), str(function.get("name")), arguments_of(function.get("arguments"), where))


def answer(request: ChatRequest, turn: AssistantTurn) -> Json:
    """Return the answer as one JSON object."""
    message: Json = {"role": "assistant", "content": _content(turn), "refusal": None}
    if turn.calls:
        message["tool_calls"] = _calls(turn)
    choice: Json = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(turn)}
    return {**_head(request, turn, "chat.completion"), "choices": [choice], "usage": _usage(turn)}


def chunks(request: ChatRequest, turn: AssistantTurn) -> Iterator[bytes]:
    """Yield the answer as a stream of server-sent events, in one piece."""
    head = _head(request, turn, "chat.completion.chunk")
    delta: Json = {"role": "assistant", "content": _content(turn)}
    if turn.calls:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(_calls(turn))]
    yield event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield event(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": _finish_reason(turn)}]})
    if request.stream_usage:
        yield event(head | {"choices": [], "usage": _usage(turn)})
    yield event("[DONE]")


def error(message: str, kind: str, code: str) -> Json:
    """Return the body of an error response."""
    kind = {"authentication": "authentication_error", "server": "server_error"}.get(kind, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _head(request: ChatRequest, turn: AssistantTurn, kind: str) -> Json:
    return {"id": f"chatcmpl-{turn.name}", "object": kind, "created": 0, "model": request.model}


def _calls(turn: AssistantTurn) -> list[Json]:
    return [
        {"id": name, "type": "function", "function": {"name": call.tool, "arguments": json.dumps(call.arguments)}}
        for name, call in turn.calls
    ]


def _content(turn: AssistantTurn) -> str | None:
    """Return the text of a message. An empty text stays empty. None marks a turn with only tool calls."""
    return turn.text if turn.text or not turn.calls else None


def _finish_reason(turn: AssistantTurn) -> str:
    return "tool_calls" if turn.calls else "length" if turn.truncated else "stop"


def _usage(turn: AssistantTurn) -> Json:
    total = turn.prompt_tokens + turn.own_tokens
    return {"prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.own_tokens, "total_tokens": total}
