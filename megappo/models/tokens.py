"""Conversion between texts and token ids, and checks of token ids against a model's embedding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import strftime
from typing import TYPE_CHECKING

from megappo.errors import show
from megappo.files.json_values import JSONValue

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, JSONValue]
"""Message of a chat as templates read it: `role`, `content` and other fields of the template."""


def call_arguments(value: JSONValue) -> dict[str, JSONValue]:
    """Return the arguments of a tool call as an object for chat templates. OpenAI's protocol has JSON text instead.

    Raises ValueError for other values. The error text continues the phrase "calls a tool with".
    """
    arguments = value
    if isinstance(value, str):
        try:
            arguments = json.loads(value or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"arguments that are no JSON ({error})") from error
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments {show(arguments)}, must be an object")
    return {name: arguments[name] for name in arguments}


@dataclass(frozen=True)
class TokenRows:
    """Rows of the smallest embedding among the models that read the same tokens, without padding."""

    count: int
    """`vocab_size` of the model's config.json. Ids below this number have a row."""
    model: str
    """Folder or hub name of the model with the smallest embedding."""

    def problem(self, token_ids: Sequence[int]) -> str:
        """Return a phrase for the first id without a row, or "" if each id has a row."""
        missing = without_row(token_ids, self.count)
        if missing is None:
            return ""
        return f"token {missing}, for which the model '{self.model}' has no row (its vocab_size is {self.count})"


def without_row(token_ids: Sequence[int], rows: int) -> int | None:
    """Return the first id without a row in an embedding of `rows` rows, or None."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < rows):
        return None
    return next(token for token in token_ids if not 0 <= token < rows)


_PROBES = ("a", "0")
"""Texts that are an ordinary token in most tokenizers."""


def tokens_around(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = ()) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer adds before and after a text, mostly bos and eos.

    `texts` are further probes for tokenizers without ordinary tokens for the built-in probes.
    """
    special = {*tokenizer.all_special_ids}
    for text in (*_PROBES, *sorted(texts, key=len)):
        plain: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not plain or plain[0] in special or plain[-1] in special:
            continue
        whole: list[int] = tokenizer(text)["input_ids"]
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
    return [], []


def continued_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return token ids of texts that a model continues. Start tokens of the tokenizer are added, end tokens are not.

    A text that already begins with the start tokens, such as a rendered chat template, is not changed.
    """
    before, _ = tokens_around(tokenizer, texts)
    plain: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [ids if ids[:1] == before[:1] else [*before, *ids] for ids in plain]


def whole_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return token ids of a complete text with the tokenizer's start and end tokens, without duplicates."""
    before, behind = tokens_around(tokenizer, [text])
    plain: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    begun = plain if plain[:1] == before[:1] else [*before, *plain]
    return begun if plain[-1:] == behind[-1:] else [*begun, *behind]


def decoded(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """Return the exact text of tokens. transformers would remove blanks before punctuation for tokenizers that set
    `clean_up_tokenization_spaces`."""
    return str(
        tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )


_CLOCK = "strftime_now"
"""Function that returns the date to chat templates (transformers 5.19, chat_template_utils)."""


def reads_clock(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer's chat template depends on the date."""
    return _CLOCK in str(tokenizer.chat_template or "")


def template_now() -> str:
    """Return the current time in the format of `data.template_time`."""
    return strftime("%Y-%m-%d %H:%M:%S")


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    goes_on: bool,
    tools: Sequence[JSONValue] | None = None,
    time: str | None = None,
) -> str:
    """Render a conversation with a tokenizer's chat template.

    Args:
        tokenizer: tokenizer with the template.
        messages: messages of the conversation.
        goes_on: whether the text ends at the beginning of the model's turn.
        tools: tools in the format of the template.
        time: date and time for templates that use them (`data.template_time`); None: now.

    Raises the errors of the template.
    """
    clock = {} if time is None or not reads_clock(tokenizer) else {_CLOCK: datetime.fromisoformat(time).strftime}
    chat = [dict(message) for message in messages]
    tool_list = None if tools is None else list(tools)
    return str(
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=goes_on, tools=tool_list, **clock)
    )
