"""The last look at token ids before a model reads them, and at their log-probabilities before they are trained on,
whatever engine, function or record they come from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import repeat

from megappo.config.tokens import without_row
from megappo.engines.protocol import Completion, GenerateRequest
from megappo.errors import RunError


def check_requests(requests: Iterable[GenerateRequest], rows: int | None, asker: str = "a request") -> None:
    """Raise RunError for a token that a model with so many rows has none for; None: any may come."""
    for request in requests:
        _check(request.token_ids, rows, f"{asker} wants an answer to")


def check_answers(
    completions: Iterable[Completion],
    rows: int | None,
    answerer: str = "the engine",
    samples: Iterable[int] | None = None,
) -> None:
    """The same for answers, which are trained on and may be answered in turn; and for log-probabilities that are no
    finite numbers. `samples` are what errors call the answers."""
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
    """Whether all are; by their sum, as each token has one."""
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
