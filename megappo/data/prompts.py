"""Tokenised prompts."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from megappo.config.context import continuation_text
from megappo.config.data import DataSettings, DataSourceSettings
from megappo.config.tokens import TokenRows, continued_ids, reads_clock, rendered, template_now, tokens_around
from megappo.data.sources import Chat, Record, checked_text, read_records
from megappo.observe.json_values import JSONValue
from megappo.plugins import users_code
from megappo.types import CHAT_MESSAGES, Prompt

WHOLE_CHARACTERS = 1_000_000
"""Prompts up to so many characters are always tokenised whole. Of longer ones only the end is tokenised where that
proves that they are over the limit: a hundred megabytes would be tokenised for minutes."""
END_CHARACTERS, END_CHARACTERS_PER_TOKEN = 100_000, 16
"""Characters of a longer prompt's end that are tokenised at first: the larger of both numbers, the second times the
limit in tokens."""


class PromptDataset:
    """The prompts of a source as the model sees them; over-long ones are dropped, cut or refused, and counted."""

    def __init__(
        self,
        source: DataSourceSettings,
        settings: DataSettings,
        tokenizer: PreTrainedTokenizerBase,
        tool_schemas: Sequence[JSONValue] = (),
        name: str = "",
        rows: TokenRows | None = None,
    ) -> None:
        """Read and tokenise everything; `tool_schemas` are what chat templates tell a model of its tools, `name` is the
        source's in a mixture. `rows`: which tokens models can read.

        Raises ValueError for unusable data, or where nothing is left.
        """
        self._settings, self._tokenizer, self._name, self._rows = settings, tokenizer, name, rows
        self.source = source.source
        if settings.apply_chat_template and not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template; name a file with one in data.chat_template, or set "
                "data.apply_chat_template: false for prompts that are plain text"
            )
        if settings.system_prompt is not None and not settings.apply_chat_template:
            raise ValueError("data.system_prompt is set, but apply_chat_template is false; write it into the prompts")
        self._tools = list(tool_schemas) or None
        self._before = () if settings.apply_chat_template else tuple(tokens_around(tokenizer)[0])
        """Tokens that every text begins with."""
        self.reads_clock = settings.apply_chat_template and reads_clock(tokenizer)
        """Whether prompts depend on `data.template_time`."""
        self._time = settings.template_time or template_now()
        self.dropped = 0
        self.truncated = 0
        self._prompts = self._tokenise(read_records(source))
        if not self._prompts:
            raise ValueError(
                f"all {self.dropped} prompts of '{source.source}' are longer than data.max_prompt_tokens "
                f"{settings.max_prompt_tokens}; raise it, or set data.overlong_prompts: truncate"
            )
        self.fingerprint = _fingerprint(self._prompts)
        """sha256 over the tokenised prompts and their answers, in order."""

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, position: int) -> Prompt:
        return self._prompts[position]

    def position_of(self, prompt: Prompt) -> int:
        """Position of a prompt in the data set; its index counts dropped prompts too."""
        return bisect_left(self._prompts, prompt.index, key=lambda own: own.index)

    def _tokenise(self, records: Sequence[Record]) -> list[Prompt]:
        chats = [self._messages(index, record) for index, record in enumerate(records)]
        texts = [
            str(record.prompt) if chat is None else self._render(index, chat)
            for index, (record, chat) in enumerate(zip(records, chats, strict=True))
        ]
        prompts = []
        every = zip(records, chats, texts, self._token_ids(texts), strict=True)
        for index, (record, chat, text, ids) in enumerate(every):
            metadata = record.metadata if chat is None else {**record.metadata, CHAT_MESSAGES: chat}
            fitted = self._fit(Prompt(index, tuple(ids), text, record.answer, metadata, self._name))
            if fitted is not None:
                self._check_rows(fitted)
                prompts.append(fitted)
        return prompts

    def _check_rows(self, prompt: Prompt) -> None:
        problem = "" if self._rows is None else self._rows.problem(prompt.token_ids)
        if problem:
            raise ValueError(
                f"prompt {prompt.index} of '{self.source}' has {problem}; use the tokenizer that the model was trained "
                "with, or change the prompt, the chat template or the tools"
            )

    def _token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text; for a very long text over the limit only those of its end, which are over it too."""
        whole = [text if len(text) <= WHOLE_CHARACTERS else self._end_over_limit(text) for text in texts]
        if not self._settings.apply_chat_template:
            return continued_ids(self._tokenizer, whole)
        # A rendered template holds its special tokens already.
        ids: list[list[int]] = self._tokenizer(whole, add_special_tokens=False)["input_ids"]
        return ids

    def _end_over_limit(self, text: str) -> str:
        """The end of a text with more than twice the tokens allowed; the whole text where it has fewer.

        Twice, because tokens next to the cut may differ from those of the whole text, and those that `truncate` keeps
        are far from it.
        """
        limit = self._settings.max_prompt_tokens
        characters = max(END_CHARACTERS, END_CHARACTERS_PER_TOKEN * limit)
        while characters < len(text):
            end = text[-characters:]
            if len(self._tokenizer(end, add_special_tokens=False)["input_ids"]) > 2 * limit:
                return end
            characters *= 4
        return text

    def _messages(self, index: int, record: Record) -> Chat | None:
        """The chat of a record with the system prompt; None where prompts are plain text."""
        settings, messages = self._settings, record.prompt
        if not settings.apply_chat_template:
            if not isinstance(messages, str):
                further = "" if self._tokenizer.chat_template else " and data.chat_template to a file, as none is there"
                raise ValueError(
                    f"prompt {index} of '{self.source}' is a list of chat messages; set data.apply_chat_template: true"
                    + further
                )
            return None
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if settings.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": settings.system_prompt}, *messages]
        return messages

    def _render(self, index: int, messages: Chat) -> str:
        where = f"prompt {index} of '{self.source}'"
        remedy = "fix its messages, data.system_prompt or the template"
        with users_code(f"the chat template refuses {where}", remedy):
            text = rendered(self._tokenizer, messages, goes_on=True, tools=self._tools, time=self._time)
        return checked_text(text, where, "rendered chat")

    def _fit(self, prompt: Prompt) -> Prompt | None:
        """The prompt within `max_prompt_tokens`; None where it is dropped."""
        length, limit = len(prompt.token_ids), self._settings.max_prompt_tokens
        where = f"prompt {prompt.index} of '{self.source}'"
        if length == 0:
            raise ValueError(f"{where} becomes no token at all; write it in the tokenizer's alphabet, or remove it")
        if length <= limit:
            return prompt
        match self._settings.overlong_prompts:
            case "error":
                least = "at least " if len(prompt.text) > WHOLE_CHARACTERS else ""
                raise ValueError(
                    f"{where} has {least}{length} tokens, more than data.max_prompt_tokens {limit}; "
                    "raise it, or set data.overlong_prompts: drop"
                )
            case "drop":
                self.dropped += 1
                return None
        self.truncated += 1
        shorter = self._with_shorter_text if prompt.metadata.get(CHAT_MESSAGES) is None else self._with_shorter_message
        fitted = shorter(prompt)
        if fitted is None:
            part = "the text" if prompt.metadata.get(CHAT_MESSAGES) is None else "the last message of the role user"
            raise ValueError(
                f"{where} has {length} tokens, more than data.max_prompt_tokens {limit}, and the last character of "
                f"{part} alone does not fit; raise data.max_prompt_tokens, or set data.overlong_prompts: drop"
            )
        return fitted

    def _with_shorter_text(self, prompt: Prompt) -> Prompt | None:
        """The prompt with the last tokens of its text, after the tokens that begin every text; None if these tokens
        use up the limit."""
        before = self._before if prompt.token_ids[: len(self._before)] == self._before else ()
        room = self._settings.max_prompt_tokens - len(before)
        if room < 1:
            return None
        kept = prompt.token_ids[-room:]
        return replace(prompt, token_ids=(*before, *kept), text=continuation_text(self._tokenizer, kept))

    def _with_shorter_message(self, prompt: Prompt) -> Prompt | None:
        """The prompt with the end of its last user message, rendered again; None if no character of the message
        fits."""
        chat: Chat = prompt.metadata[CHAT_MESSAGES]
        place = next((i for i in reversed(range(len(chat))) if chat[i]["role"] == "user"), None)
        if place is None or not (content := str(chat[place]["content"])):
            return None

        def with_end(characters: int) -> Prompt:
            messages = [*chat[:place], {**chat[place], "content": content[-characters:]}, *chat[place + 1 :]]
            text = self._render(prompt.index, messages)
            ids = tuple(self._token_ids([text])[0])
            return replace(prompt, token_ids=ids, text=text, metadata={**prompt.metadata, CHAT_MESSAGES: messages})

        def is_over(characters: int) -> bool:
            return len(with_end(characters).token_ids) > self._settings.max_prompt_tokens

        if is_over(1):
            return None
        fits, over = 1, 2
        while over < len(content) and not is_over(over):
            fits, over = over, 2 * over
        return with_end(fits + bisect_left(range(fits + 1, min(over, len(content))), True, key=is_over))


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.token_ids, prompt.answer]).encode())
    return digest.hexdigest()
