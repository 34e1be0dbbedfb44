"""Texts that end a response (`rollout.stop`), in every engine alike: a response ends where its text first contains one.

The tokens of that text stay in the response, in what rewards read and in what is trained on, as stop tokens do: what
was sampled is what counts. A text may begin and end within tokens; the token that completes it is the last, whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megappo.config.context import continuation_text
from megappo.engines.stretches import cut

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megappo.engines.protocol import Completion, SamplingParams

_FURTHER_TOKENS = 8
"""Tokens that are looked at beyond one for each byte of the longest text: some tokens have no text of their own."""


@dataclass(frozen=True)
class StopTexts:
    """Stop texts, and the tokenizer that turns tokens into text."""

    texts: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase = field(compare=False, repr=False)

    def end(self, token_ids: Sequence[int]) -> int | None:
        """Number of a response's tokens up to where its text first contains one of the texts; None: it never does."""
        if not self._stand_in(token_ids):
            return None
        return bisect_left(range(len(token_ids)), True, key=lambda n: self._stand_in(token_ids[: n + 1])) + 1

    def ends_now(self, token_ids: Sequence[int]) -> bool:
        """Whether the newest of these tokens may have completed a stop text; for an engine that checks after every
        token."""
        tail = max(len(text.encode()) for text in self.texts) + _FURTHER_TOKENS
        return self._stand_in(token_ids[-tail:])

    def _stand_in(self, token_ids: Sequence[int]) -> bool:
        text = continuation_text(self.tokenizer, token_ids)
        return any(wanted in text for wanted in self.texts)


def stopped(answer: Completion, params: SamplingParams) -> Completion:
    """The answer cut after the first of `params.stop_texts`; tokens that the engine made beyond it are dropped."""
    end = None if params.stop_texts is None else params.stop_texts.end(answer.token_ids)
    return answer if end is None else cut(answer, end, truncated=False)
