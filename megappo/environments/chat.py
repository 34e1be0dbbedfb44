"""Tokens of a chat template between two turns of a model.

The template is applied to the conversation before and after the new messages. The difference gives the new tokens. A
placeholder replaces turns of the model, because the tokens of these turns are in the sequence already and are never
tokenized again.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from megappo.files.json_values import JSONValue
from megappo.models.tokens import Message, rendered, template_now
from megappo.plugins import users_code

PLACEHOLDER = "<think>\nSo it is.\n</think>\n\nYes."
"""Placeholder for a turn of the model. It contains thoughts, so that templates that remove earlier thoughts are
detected."""
BEGINNING: Message = {"role": "user", "content": "Begin."}
"""Placeholder for a prompt with unknown messages."""
_REMEDY = "give model.tokenizer a template that keeps them, or set data.apply_chat_template: false"


class ChatTokens:
    """The chat template of one tokenizer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        schemas: Sequence[JSONValue] = (),
        time: str | None = None,
    ) -> None:
        """`time`: see `data.template_time`."""
        self._tokenizer, self._stops, self._schemas = tokenizer, frozenset(stop_token_ids), list(schemas) or None
        self._time = time or template_now()

    def check(self, role: str) -> None:
        """Raise ValueError if messages of this role cannot follow a turn of the model."""
        reply: Message = {"role": "assistant", "content": PLACEHOLDER}
        following: Message = {"role": role, "content": "Go on."}
        self.between([BEGINNING, reply], [following], closed=True)
        self.between([BEGINNING, reply, following, reply], [following], closed=True)

    def between(self, before: Sequence[Message], following: Sequence[Message], *, closed: bool) -> list[int]:
        """Return the tokens from the end of the last turn of the model to the beginning of its next turn.

        Args:
            before: the conversation. Its last message is a turn of the model, with any content.
            following: the messages after this turn, at least one.
            closed: whether a stop token ended the turn. Otherwise the stop token of the template comes first.

        Raises ValueError if the template changes earlier turns.
        """
        old, new = self._ids(before, goes_on=False), self._ids([*before, *following], goes_on=True)
        stop = next((i for i in reversed(range(len(old))) if old[i] in self._stops), None)
        if stop is None or stop < len(self._ids(before[:-1], goes_on=True)):
            raise ValueError(
                "the chat template ends what the model says with none of the stop tokens; add the closing token "
                "of the template to rollout.stop_token_ids"
            )
        if new[: stop + 1] != old[: stop + 1]:
            raise ValueError(
                "the chat template changes what was said in earlier turns once a message of the role "
                f"'{following[0]['role']}' follows, so the model would be trained on text that it never generated; "
                f"{_REMEDY}"
            )
        return new[stop + closed :]

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Return whether a stop token ended the turn, rather than a limit or a text of `rollout.stop`."""
        return token_ids[-1] in self._stops

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation up to the next turn of the model.

        Raises ValueError if the template refuses the conversation.
        """
        return self._ids(messages, goes_on=True)

    def _ids(self, messages: Sequence[Message], *, goes_on: bool) -> list[int]:
        with users_code("the chat template refuses a conversation of several turns", _REMEDY):
            text = rendered(self._tokenizer, messages, goes_on=goes_on, tools=self._schemas, time=self._time)
        # Unpaired surrogates, which JSON allows and tokenizers refuse, become `?`.
        text = text.encode("utf-8", "replace").decode()
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
