"""Check token ids before a model reads them, and check log-probabilities before training. The checks apply to every
engine, function and recorded sample."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import repeat

from megappo.engines.protocol import Completion, GenerateRequest
from megappo.errors import RunError
from megappo.models.tokens import without_row


def check_requests(requests: Iterable[GenerateRequest], rows: int | None, asker: str = "a request") -> None:
    """Raise RunError if a token id has no row in the embedding of the model.

    `rows` is the number of rows of the embedding. With None, every id is accepted.
    """
    for request in requests:
        _check(request.token_ids, rows, f"{asker} has a prompt with")


def check_answers(
    completions: Iterable[Completion],
    rows: int | None,
    answerer: str = "the engine",
    samples: Iterable[int] | None = None,
) -> None:
    """Raise RunError if answers have token ids without a row in the embedding, or missing or non-finite
    log-probabilities.

    `samples` are the sample numbers for error messages.
    """
    called = repeat("a request") if samples is None else (f"sample {number}" for number in samples)
    for completion, sample in zip(completions, called, strict=samples is not None):
        _check(completion.token_ids, rows, f"{answerer} answered with")
        if len(completion.logprobs) != len(completion.token_ids):
            raise RunError(
                f"{answerer} answered {sample} with {len(completion.token_ids)} tokens and "
                f"{len(completion.logprobs)} log-probabilities; return one log-probability for each token"
            )
        if not _is_finite(*completion.logprobs):
            place = next(i for i, number in enumerate(completion.logprobs) if not _is_finite(number))
            raise RunError(
                f"{answerer} answered {sample} with the log-probability {completion.logprobs[place]} of token "
                f"{completion.token_ids[place]} at position {place + 1} of the response; the weights or the "
                "activations are not finite; set rollout.dtype to float32, or use weights of an earlier step"
            )


def _is_finite(*numbers: float) -> bool:
    """Return whether all numbers are finite. The sum is checked, because one check of a response is faster than one
    check of each token."""
    try:
        return math.isfinite(sum(numbers))
    except (TypeError, OverflowError):
        return False


def _check(token_ids: tuple[int, ...], rows: int | None, did: str) -> None:
    if rows is None or (missing := without_row(token_ids, rows)) is None:
        return
    raise RunError(
        f"{did} token {missing}, for which the model has no row (its vocab_size is {rows}); use only ids of at most "
        f"{rows - 1}"
    )
