"""The tokens that a chat template puts between two turns of a model.

The template is applied to the conversation before and after the new messages, and the added tokens are taken. A
placeholder stands for what the model said: its own tokens are in the sequence already and are never tokenized again.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from megappo.config.tokens import Message, rendered, template_now
from megappo.observe.json_values import JSONValue
from megappo.plugins import users_code

PLACEHOLDER = "<think>\nSo it is.\n</think>\n\nYes."
"""Text in the place of a turn of the model. It contains thoughts, so that templates which remove them from earlier
turns are found out."""
BEGINNING: Message = {"role": "user", "content": "Begin."}
"""Message in the place of a prompt whose messages are not known."""
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
        """Raise ValueError where messages of this role cannot follow what the model says."""
        said: Message = {"role": "assistant", "content": PLACEHOLDER}
        heard: Message = {"role": role, "content": "Go on."}
        self.between([BEGINNING, said], [heard], closed=True)
        self.between([BEGINNING, said, heard, said], [heard], closed=True)

    def between(self, before: Sequence[Message], heard: Sequence[Message], *, closed: bool) -> list[int]:
        """The tokens from the end of the model's last turn to the beginning of its next.

        Args:
            before: the conversation; its last message is the model's, with any content.
            heard: the messages that follow, at least one.
            closed: whether a stop token ended the turn; otherwise the template's own stop token comes first.

        Raises ValueError where the template does not leave earlier turns as they were.
        """
        old, new = self._ids(before, goes_on=False), self._ids([*before, *heard], goes_on=True)
        stop = next((i for i in reversed(range(len(old))) if old[i] in self._stops), None)
        if stop is None or stop < len(self._ids(before[:-1], goes_on=True)):
            raise ValueError(
                "the chat template ends what the model says with none of the stop tokens; add the token that it ends "
                "it with to rollout.stop_token_ids"
            )
        if new[: stop + 1] != old[: stop + 1]:
            raise ValueError(
                f"the chat template changes what was said in earlier turns once a message of the role "
                f"'{heard[0]['role']}' follows, so that the model would be trained on what it never saw; {_REMEDY}"
            )
        return new[stop + closed :]

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Whether a stop token ended what the model said, not a limit or a text of `rollout.stop`."""
        return token_ids[-1] in self._stops

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation up to where the model speaks. Raises ValueError where the template refuses
        it."""
        return self._ids(messages, goes_on=True)

    def _ids(self, messages: Sequence[Message], *, goes_on: bool) -> list[int]:
        with users_code("the chat template refuses a conversation of several turns", _REMEDY):
            text = rendered(self._tokenizer, messages, goes_on=goes_on, tools=self._schemas, time=self._time)
        # Halves of surrogate pairs, which JSON can hold and tokenizers refuse, become `?`.
        text = text.encode("utf-8", "replace").decode()
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
