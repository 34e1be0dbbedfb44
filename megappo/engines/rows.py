"""Checks token ids before a model reads them, and log-probabilities before they are trained on, whatever engine,
function or record they come from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import repeat

from megappo.config.tokens import without_row
from megappo.engines.protocol import Completion, GenerateRequest
from megappo.errors import RunError


def check_requests(requests: Iterable[GenerateRequest], rows: int | None, asker: str = "a request") -> None:
    """Raise RunError for a token id that the model's embedding has no row for. `rows`: its number of rows; None: any id
    is accepted."""
    for request in requests:
        _check(request.token_ids, rows, f"{asker} wants an answer to")


def check_answers(
    completions: Iterable[Completion],
    rows: int | None,
    answerer: str = "the engine",
    samples: Iterable[int] | None = None,
) -> None:
    """Raise RunError for answers with token ids that the model has no row for, or with log-probabilities that are
    missing or not finite. `samples` are the numbers by which errors name the answers."""
    called = repeat("a request") if samples is None else (f"sample {number}" for number in samples)
    for completion, sample in zip(completions, called, strict=samples is not None):
        _check(completion.token_ids, rows, f"{answerer} answered with")
        if len(completion.logprobs) != len(completion.token_ids):
            raise RunError(
                f"{answerer} answered {sample} with {len(completion.token_ids)} tokens and {len(completion.logprobs)} "
                "log-probabilities; give one of each token"
            )
        if not _is_finite(*completion.logprobs):
            place = next(i for i, number in enumerate(completion.logprobs) if not _is_finite(number))
            raise RunError(
                f"{answerer} answered {sample} with the log-probability {completion.logprobs[place]} of token "
                f"{completion.token_ids[place]}, the response's number {place + 1}; its weights, or what it computes "
                "with them, are not finite: try rollout.dtype: float32, or weights of an earlier step"
            )


def _is_finite(*numbers: float) -> bool:
    """Whether all numbers are finite, judged by their sum: one check for a whole response is faster than one for each
    token."""
    try:
        return math.isfinite(sum(numbers))
    except (TypeError, OverflowError):
        return False


def _check(token_ids: tuple[int, ...], rows: int | None, did: str) -> None:
    if rows is None or (missing := without_row(token_ids, rows)) is None:
        return
    raise RunError(
        f"{did} token {missing}, for which the model has no row (its vocab_size is {rows}); give ids of at most "
        f"{rows - 1} alone"
    )
