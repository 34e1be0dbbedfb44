"""Answers in segments, so that long ones do not keep a batch waiting: `rollout.generation` may be such a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.types import Prompt


def segments(
    *,
    prompts: Sequence[Prompt],
    requests: Sequence[GenerateRequest],
    params: SamplingParams,
    generate: Callable[..., list[Completion]],
    tokens: int = 256,
) -> list[Completion]:
    """Each answer, asked for by so many tokens at a time; every rank asks equally often, if only for nothing."""
    results: list[Any] = [None] * len(requests)
    for first in range(0, params.max_new_tokens, tokens):
        room = [request.most_tokens(params) - first for request in requests]
        left = [i for i, done in enumerate(results) if done is None or (done.truncated and room[i] > 0)]
        begun = {i: results[i].token_ids if results[i] else () for i in left}
        continued = [
            replace(
                requests[i],
                token_ids=requests[i].token_ids + begun[i],
                seed=requests[i].seed + first,
                max_new_tokens=room[i],
                min_new_tokens=max(0, requests[i].least_tokens(params) - first),
            )
            for i in left
        ]
        most = min(tokens, params.max_new_tokens - first)
        for i, part in zip(left, generate(continued, replace(params, max_new_tokens=most)), strict=True):
            logprobs = results[i].logprobs if results[i] else ()
            results[i] = replace(part, token_ids=begun[i] + part.token_ids, logprobs=logprobs + part.logprobs)
    return results
