"""Texts to token ids and back, and the ids that a model's embedding has a row for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import strftime
from typing import TYPE_CHECKING

from megappo.errors import show
from megappo.observe.json_values import JSONValue

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megappo.config.schema import Config
    from megappo.families.architecture import ModelShape

Message = Mapping[str, JSONValue]
"""A message of a chat as templates read it: `role`, `content` and whatever else a template knows."""


def call_arguments(given: JSONValue) -> dict[str, JSONValue]:
    """The arguments of a tool call as the object that chat templates need; OpenAI's protocol has JSON text there.
    Raises ValueError, whose sentence continues "calls a tool with", for anything else."""
    arguments = given
    if isinstance(given, str):
        try:
            arguments = json.loads(given or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"arguments that are no JSON ({error})") from error
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments {show(arguments)}, must be an object")
    return {name: arguments[name] for name in arguments}


@dataclass(frozen=True)
class TokenRows:
    """The rows of the smallest embedding among the models that read the same tokens; rows of padding are none."""

    count: int
    """`vocab_size` of its config.json: ids below it have a row."""
    model: str
    """Folder or hub name of the model with the smallest embedding."""

    def problem(self, token_ids: Sequence[int]) -> str:
        """The first of these ids without a row, in words; "" where each has one."""
        missing = without_row(token_ids, self.count)
        if missing is None:
            return ""
        return f"token {missing}, for which the model '{self.model}' has no row (its vocab_size is {self.count})"


def without_row(token_ids: Sequence[int], rows: int) -> int | None:
    """The first id that an embedding of so many rows has none for."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < rows):
        return None
    return next(token for token in token_ids if not 0 <= token < rows)


def stop_token_rules(config: Config, shapes: Mapping[str, ModelShape]) -> Iterator[str]:
    """Rule on stop tokens: they can be sampled, and read by every role; `shapes` is keyed by the model's name in
    sentences."""
    name, rows = min(((n, shape.vocab_size) for n, shape in shapes.items()), key=lambda found: found[1])
    missing = without_row(config.rollout.stop_token_ids, rows)
    if missing is not None:
        yield (
            f"rollout.stop_token_ids has {missing}, for which the {name} model has no row (its vocab_size is {rows}); "
            f"set ids of at most {rows - 1}, or remove it"
        )


def response_length_rules(config: Config) -> Iterator[str]:
    """Rules on limits of responses: they leave room for one."""
    rollout, prompt = config.rollout, config.data.max_prompt_tokens
    least, total = rollout.min_response_tokens, rollout.max_total_tokens
    if least > rollout.max_response_tokens:
        yield (
            f"rollout.min_response_tokens {least} is above rollout.max_response_tokens {rollout.max_response_tokens}; "
            f"set at most {rollout.max_response_tokens}"
        )
    if total is not None and total < prompt + max(least, 1):
        yield (
            f"rollout.max_total_tokens {total} leaves no room for a response of {max(least, 1)} behind a prompt of "
            f"data.max_prompt_tokens {prompt}; set at least {prompt + max(least, 1)}, or lower data.max_prompt_tokens"
        )


_PROBES = ("a", "0")
"""Texts that most tokenizers have an ordinary token for."""


def tokens_around(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = ()) -> tuple[list[int], list[int]]:
    """(tokens before, tokens behind) that a tokenizer adds to a text by itself, mostly bos and eos.

    `texts`: some that the tokenizer is used for, in case it has no ordinary tokens for the built-in probes.
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
    """Token ids of texts that a model is to continue: with the tokenizer's beginning of a text, and without its end.

    A text that begins with these tokens already, as a rendered chat template does, gets no second beginning.
    """
    before, _ = tokens_around(tokenizer, texts)
    plain: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [ids if ids[:1] == before[:1] else [*before, *ids] for ids in plain]


def whole_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a complete text, with the tokenizer's beginning and end, neither of them twice."""
    before, behind = tokens_around(tokenizer, [text])
    plain: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    begun = plain if plain[:1] == before[:1] else [*before, *plain]
    return begun if plain[-1:] == behind[-1:] else [*begun, *behind]


def decoded(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """The exact text of these tokens: for tokenizers that say so (`clean_up_tokenization_spaces`), transformers would
    remove blanks before punctuation."""
    return str(
        tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )


_CLOCK = "strftime_now"
"""The function by which chat templates ask for the date (transformers 5.19, chat_template_utils)."""


def reads_clock(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether its chat template renders differently on another day."""
    return _CLOCK in str(tokenizer.chat_template or "")


def template_now() -> str:
    """The time as `data.template_time` has it."""
    return strftime("%Y-%m-%d %H:%M:%S")


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    goes_on: bool,
    tools: Sequence[JSONValue] | None = None,
    time: str | None = None,
) -> str:
    """A conversation rendered by a tokenizer's chat template; with `goes_on` the text ends where the model is to speak.

    `time`: date and time for a template that asks for them, see `data.template_time`; None: now. Raises whatever the
    template raises.
    """
    clock = {} if time is None or not reads_clock(tokenizer) else {_CLOCK: datetime.fromisoformat(time).strftime}
    chat = [dict(message) for message in messages]
    given = None if tools is None else list(tools)
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=goes_on, tools=given, **clock))
