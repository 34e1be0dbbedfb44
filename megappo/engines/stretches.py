"""Continue interrupted answers under newer weights, and join the stretches of all weight versions."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import groupby

from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.runtime.seeds import derived_seed


def _seed_of_rest(seed: int, tokens: int) -> int:
    """Return the 63-bit seed for the remainder of an answer that has `tokens` tokens."""
    return derived_seed(seed, "after", tokens)


def continued(
    request: GenerateRequest, partial: Completion | None, most_tokens: int, least_tokens: int = 0
) -> GenerateRequest:
    """Return the request for the remainder of an interrupted answer.

    The seed differs from the seed of the first request, because engines may count positions from the start of each
    request.
    """
    if partial is None:
        return request
    return replace(
        request,
        token_ids=request.token_ids + partial.token_ids,
        seed=_seed_of_rest(request.seed, len(partial.token_ids)),
        max_new_tokens=most_tokens - len(partial.token_ids),
        min_new_tokens=max(0, least_tokens - len(partial.token_ids)),
    )


def joined(earlier: Completion | None, later: Completion) -> Completion:
    """Join an answer and its continuation into one answer."""
    if earlier is None:
        return later
    if not later.token_ids:
        return earlier
    stretches = stretches_in(token_versions(earlier) + token_versions(later))
    return replace(
        later,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        weight_version=min(version for version, _ in stretches),
        stretches=stretches if len(stretches) > 1 else (),
    )


def ended(answer: Completion, stop_token_ids: Collection[int], most_tokens: int) -> Completion:
    """Mark an interrupted answer as complete if the last token is a stop token or reaches the limit."""
    if not answer.broken_off or not answer.token_ids:
        return answer
    stopped = answer.token_ids[-1] in stop_token_ids
    if not stopped and len(answer.token_ids) < most_tokens:
        return answer
    return replace(answer, broken_off=False, truncated=not stopped)


def cut(answer: Completion, tokens: int, *, truncated: bool) -> Completion:
    """Return the first `tokens` tokens as a complete answer. `tokens` is at least 1 and at most the length of the
    answer."""
    routing, stretches = answer.routing, stretches_in(token_versions(answer)[:tokens])
    return replace(
        answer,
        token_ids=answer.token_ids[:tokens],
        logprobs=answer.logprobs[:tokens],
        truncated=truncated,
        weight_version=min(version for version, _ in stretches),
        routing=None if routing is None else routing[: len(routing) - (len(answer.token_ids) - tokens)],
        broken_off=False,
        stretches=stretches if len(stretches) > 1 else (),
    )


def stopped(answer: Completion, params: SamplingParams) -> Completion:
    """Cut the answer after the first of `params.stop_texts` and drop the later tokens."""
    end = None if params.stop_texts is None else params.stop_texts.end(answer.token_ids)
    return answer if end is None else cut(answer, end, truncated=False)


def token_versions(answer: Completion) -> list[int]:
    """Return the weight version of each token."""
    return [version for version, tokens in stretches_of(answer) for _ in range(tokens)]


def stretches_of(answer: Completion) -> tuple[tuple[int, int], ...]:
    """Return the weight version and the number of tokens of each stretch."""
    return answer.stretches or ((answer.weight_version, len(answer.token_ids)),)


def stretches_in(versions: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the weight version and the number of tokens of each stretch, given the version of each token."""
    return tuple((version, len(list(alike))) for version, alike in groupby(versions))
