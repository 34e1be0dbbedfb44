"""OpenAI's `POST /v1/chat/completions`, as its SDKs write and read it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from megappo.config.tokens import Message
from megappo.environments.gateway.wire import (
    Asked,
    Json,
    RefusedError,
    Said,
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
from megappo.observe.json_values import JSONValue

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
"""Fields that are refused unless they have one of these values, which change nothing. A seed, a temperature and
penalties are ignored: the run decides them."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def asked(body: Mapping[str, JSONValue]) -> Asked:
    """Read a request. Raises RefusedError."""
    refuse_unknown(body, _REFUSED)
    messages = required(body, "messages", list, "a list of messages")
    options = body.get("stream_options")
    return Asked(
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
    """The fields of a message that a chat template reads: SDKs send back more of an answer than they were given, or
    less."""
    where = f"message {number}"
    role = _ROLES.get(str(message.get("role"))) if isinstance(message, dict) else None
    if not isinstance(message, dict) or role is None:
        raise RefusedError(f"{where} is {show(message)}, must have the role {', '.join(_ROLES)}")
    told: Json = {"role": role, "content": text_of(message.get("content"), where)}
    if calls := listed(message, "tool_calls"):
        told["tool_calls"] = [_call(call, where) for call in calls]
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            told[key] = message[key]
    return told


def _call(call: JSONValue, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RefusedError(f"{where} has the call {show(call)}, must be of a function")
    return called(str(call.get("id")), str(function.get("name")), arguments_of(function.get("arguments"), where))


def answer(asked: Asked, said: Said) -> Json:
    """The answer as one JSON object."""
    message: Json = {"role": "assistant", "content": _content(said), "refusal": None}
    if said.calls:
        message["tool_calls"] = _calls(said)
    choice: Json = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(said)}
    return {**_head(asked, said, "chat.completion"), "choices": [choice], "usage": _usage(said)}


def chunks(asked: Asked, said: Said) -> Iterator[bytes]:
    """The answer as a stream of server-sent events, in one piece."""
    head = _head(asked, said, "chat.completion.chunk")
    delta: Json = {"role": "assistant", "content": _content(said)}
    if said.calls:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(_calls(said))]
    yield event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield event(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": _finish_reason(said)}]})
    if asked.stream_usage:
        yield event(head | {"choices": [], "usage": _usage(said)})
    yield event("[DONE]")


def error(message: str, kind: str, code: str) -> Json:
    """Body of an error response."""
    kind = {"authentication": "authentication_error", "server": "server_error"}.get(kind, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _head(asked: Asked, said: Said, kind: str) -> Json:
    return {"id": f"chatcmpl-{said.name}", "object": kind, "created": 0, "model": asked.model}


def _calls(said: Said) -> list[Json]:
    return [
        {"id": name, "type": "function", "function": {"name": call.tool, "arguments": json.dumps(call.arguments)}}
        for name, call in said.calls
    ]


def _content(said: Said) -> str | None:
    """The text of a message. An empty text stays one; null stands for a turn that only calls tools."""
    return said.text if said.text or not said.calls else None


def _finish_reason(said: Said) -> str:
    return "tool_calls" if said.calls else "length" if said.truncated else "stop"


def _usage(said: Said) -> Json:
    total = said.prompt_tokens + said.own_tokens
    return {"prompt_tokens": said.prompt_tokens, "completion_tokens": said.own_tokens, "total_tokens": total}
