"""Texts that end a response (`rollout.stop`), the same in every engine: where its text first has one of them in it.

The tokens of that text stay in the response, in what rewards read and in what is trained on, as stop tokens do: what
was sampled is what counts. A text may begin and end within tokens; the token that completes it is the last, whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megappo.config.tokens import decoded
from megappo.engines.stretches import stretches_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megappo.engines.protocol import Completion, SamplingParams

_FURTHER_TOKENS = 8
"""Beyond one for each byte of a text: some tokens have no text of their own."""


@dataclass(frozen=True)
class StopTexts:
    """Texts, and the tokenizer by which tokens have text."""

    texts: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase = field(compare=False, repr=False)

    def end(self, token_ids: Sequence[int]) -> int | None:
        """How many of a response's tokens there are when its text first has one of these; None: it never has."""
        if not self._stand_in(token_ids):
            return None
        return bisect_left(range(len(token_ids)), True, key=lambda n: self._stand_in(token_ids[: n + 1])) + 1

    def ends_now(self, token_ids: Sequence[int]) -> bool:
        """Whether the newest of these tokens may have completed one: for an engine that looks after every token."""
        tail = max(len(text.encode()) for text in self.texts) + _FURTHER_TOKENS
        return self._stand_in(token_ids[-tail:])

    def _stand_in(self, token_ids: Sequence[int]) -> bool:
        text = decoded(self.tokenizer, token_ids)
        return any(wanted in text for wanted in self.texts)


def stopped(answer: Completion, params: SamplingParams) -> Completion:
    """An answer to its end by `params.stop_texts`: what an engine made beyond is no part of it."""
    end = None if params.stop_texts is None else params.stop_texts.end(answer.token_ids)
    if end is None:
        return answer
    beyond, stretches, left = len(answer.token_ids) - end, [], end
    for version, tokens in stretches_of(answer):
        if left > 0:
            stretches.append((version, min(tokens, left)))
        left -= tokens
    routing = answer.routing
    return replace(
        answer,
        token_ids=answer.token_ids[:end],
        logprobs=answer.logprobs[:end],
        truncated=False,
        weight_version=min(version for version, _ in stretches),
        routing=None if routing is None else routing[: len(routing) - beyond],
        broken_off=False,
        stretches=tuple(stretches) if len(stretches) > 1 else (),
    )
