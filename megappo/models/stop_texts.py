"""Stop texts of responses (`rollout.stop`). A response ends at the first occurrence of a stop text.

The tokens of the stop text remain in the response, as stop tokens do. Rewards and training include them, because the
policy sampled them. A stop text may begin and end inside tokens. The token that completes the text is the last token
of the response, and is never split.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megappo.models.context import continuation_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EXTRA_TOKENS = 8
"""Extra tokens to decode in addition to one token per byte of the longest text. Some tokens decode to an empty text."""


@dataclass(frozen=True)
class StopTexts:
    """The stop texts and the tokenizer that decodes tokens."""

    texts: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase = field(compare=False, repr=False)

    def end(self, token_ids: Sequence[int]) -> int | None:
        """Return the number of tokens until the first stop text is complete, or None if the response contains no stop
        text."""
        if not self._has_stop(token_ids):
            return None
        return bisect_left(range(len(token_ids)), True, key=lambda n: self._has_stop(token_ids[: n + 1])) + 1

    def ends_now(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last token may have completed a stop text. An engine calls this method after each
        token."""
        tail = max(len(text.encode()) for text in self.texts) + _EXTRA_TOKENS
        return self._has_stop(token_ids[-tail:])

    def _has_stop(self, token_ids: Sequence[int]) -> bool:
        text = continuation_text(self.tokenizer, token_ids)
        return any(stop in text for stop in self.texts)
