"""The last look at token ids before a model reads them, whatever engine, function or record they come from."""

from __future__ import annotations

from collections.abc import Iterable

from megappo.config.tokens import without_row
from megappo.engines.protocol import Completion, GenerateRequest
from megappo.errors import RunError


def check_requests(requests: Iterable[GenerateRequest], rows: int | None, asker: str = "a request") -> None:
    """Raise RunError for a token that a model with so many rows has none for; None: any may come."""
    for request in requests:
        _check(request.token_ids, rows, f"{asker} wants an answer to")


def check_answers(completions: Iterable[Completion], rows: int | None, answerer: str = "the engine") -> None:
    """The same for answers, which are trained on and may be answered in turn."""
    for completion in completions:
        _check(completion.token_ids, rows, f"{answerer} answered with")


def _check(token_ids: tuple[int, ...], rows: int | None, did: str) -> None:
    if rows is None or (missing := without_row(token_ids, rows)) is None:
        return
    raise RunError(
        f"{did} token {missing}, for which the model has no row (its vocab_size is {rows}); give ids of at most "
        f"{rows - 1} alone"
    )
