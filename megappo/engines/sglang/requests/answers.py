"""Parse the responses of SGLang to generation requests."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Literal, NotRequired, TypedDict

import torch
from torch import Tensor

from megappo.engines.protocol import CacheUse, Completion, GenerateRequest
from megappo.engines.sglang.client import Endpoint, ServerFailure
from megappo.types import RoutingShape


class _Finish(TypedDict):
    type: str


class _Span(TypedDict):
    """Tokens `start` to `end` of an answer, generated with one weight version."""

    version: str
    start: int
    end: int


class AnswerFacts(TypedDict):
    """The fields of `meta_info` that the client reads."""

    finish_reason: _Finish
    output_token_logprobs: list[tuple[float | None, int]]
    """Log-probability and id of each token. Further entries are ignored."""
    weight_version: str
    weight_versions: NotRequired[list[_Span] | None]
    prompt_tokens: NotRequired[int | None]
    cached_tokens: NotRequired[int | None]
    routed_experts: NotRequired[str | None]


class Answer(TypedDict):
    """Answer of SGLang to one request of a group."""

    output_ids: list[int]
    meta_info: AnswerFacts


def completion_of(text: Answer, endpoint: Endpoint, versions: range, *, may_be_aborted: bool = False) -> Completion:
    """Check and convert one answer. `versions` are the permitted weight versions of its tokens.

    Raises ServerFailure if the answer is cut off, or if other weights made the tokens.
    """
    meta = text["meta_info"]
    ids = tuple(text["output_ids"])
    is_aborted = may_be_aborted and meta["finish_reason"]["type"] == "abort"
    if is_aborted and not ids:  # SGLang returns no log-probabilities for requests that it has not started
        return Completion((), (), truncated=False, weight_version=versions[-1], broken_off=True)
    logprobs = meta["output_token_logprobs"]
    if meta["finish_reason"]["type"] not in ("stop", "length") and not is_aborted:
        raise ServerFailure(f"{endpoint.name} broke a response off: {meta['finish_reason']}")
    stretches = _stretches(meta, len(ids), endpoint, versions)
    if not ids or [entry[1] for entry in logprobs] != list(ids):
        raise ServerFailure(f"{endpoint.name} returned {len(ids)} tokens with {len(logprobs)} log-probabilities")
    truncated = meta["finish_reason"]["type"] == "length"
    oldest = min(version for version, _ in stretches)
    told = stretches if len(stretches) > 1 else ()
    numbers = tuple(math.nan if entry[0] is None else entry[0] for entry in logprobs)  # JSON has no nan
    return Completion(ids, numbers, truncated, oldest, broken_off=is_aborted, stretches=told)


def _stretches(meta: AnswerFacts, tokens: int, endpoint: Endpoint, versions: range) -> tuple[tuple[int, int], ...]:
    """Return the weight version and the number of tokens of each stretch, in order. SGLang records the versions that
    the sync assigns."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": tokens}]
    told = {span["version"] for span in spans} | {meta["weight_version"]}
    known = {str(version): version for version in versions}
    if not told <= known.keys():
        wanted = f"{versions[0]}" if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        raise ServerFailure(f"{endpoint.name} generated with weights {sorted(told)}, not {wanted}")
    ends = [0, *(span["end"] for span in spans)]
    if [span["start"] for span in spans] != ends[:-1] or ends[-1] != tokens:
        raise ServerFailure(f"{endpoint.name} does not report the weight version of each of {tokens} tokens: {spans}")
    return tuple((known[span["version"]], span["end"] - span["start"]) for span in spans)


def cache_use(texts: Sequence[Answer]) -> CacheUse:
    """Return the cache use of the prompts of these answers, including interrupted answers."""
    told = [text["meta_info"] for text in texts]
    names: tuple[Literal["prompt_tokens", "cached_tokens"], ...] = ("prompt_tokens", "cached_tokens")
    return CacheUse(*(sum(int(meta.get(name) or 0) for meta in told) for name in names))


def routing_of(text: Answer, request: GenerateRequest, shape: RoutingShape, endpoint: Endpoint) -> Tensor:
    """Return the experts of each token, (T - 1, L, K), decoded from SGLang's base64 of int32. Raises ServerFailure if
    the length is wrong."""
    told = base64.b64decode(text["meta_info"].get("routed_experts") or "")
    sizes = (len(request.token_ids) + len(text["output_ids"]) - 1, shape.layers, shape.experts_per_token)
    if len(told) != 4 * math.prod(sizes):
        raise ServerFailure(
            f"{endpoint.name} did not return the experts of all {' x '.join(map(str, sizes))} positions"
        )
    numbers = torch.frombuffer(bytearray(told), dtype=torch.int32)
    is_expert = (numbers >= 0) & (numbers < shape.experts)
    return torch.where(is_expert, numbers, torch.iinfo(shape.dtype).max).to(shape.dtype).view(sizes)
