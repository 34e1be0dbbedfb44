"""Tokenised prompts."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from megappo.config.sections.data import DataSettings, DataSourceSettings
from megappo.data.sources import Chat, Record, checked_text, read_records
from megappo.files.json_values import JSONValue
from megappo.models.context import continuation_text
from megappo.models.tokens import TokenRows, continued_ids, reads_clock, rendered, template_now, tokens_around
from megappo.plugins import users_code
from megappo.types import CHAT_MESSAGES, Prompt

WHOLE_CHARACTERS = 1_000_000
"""Maximum number of characters of a prompt that is always tokenised completely. For longer prompts, only the tail that
shows that the prompt exceeds the limit is tokenised, because tokenising 100 MB takes minutes."""
END_CHARACTERS, END_CHARACTERS_PER_TOKEN = 100_000, 16
"""Number of characters of the first tail of a longer prompt: the first value, or the second value times the limit in
tokens, if larger."""


class PromptDataset:
    """Tokenised prompts of a source. Prompts above the limit are dropped, cut or refused, and counted."""

    def __init__(
        self,
        source: DataSourceSettings,
        settings: DataSettings,
        tokenizer: PreTrainedTokenizerBase,
        tool_schemas: Sequence[JSONValue] = (),
        name: str = "",
        rows: TokenRows | None = None,
    ) -> None:
        """Read and tokenise all prompts.

        Args:
            source: source of the prompts.
            settings: settings of the data.
            tokenizer: tokenizer of the model.
            tool_schemas: schemas of tools for the chat template.
            name: name of the source in a mixture.
            rows: tokens with an embedding row.

        Raises ValueError if the data are unusable, or if no prompt remains.
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
        """Tokens at the start of every text."""
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
        """Return the position of a prompt in the data set. The index of a prompt also counts dropped prompts."""
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
        """Return the token ids of each text. For a very long text above the limit, return the ids of a tail above the
        limit."""
        whole = [text if len(text) <= WHOLE_CHARACTERS else self._end_over_limit(text) for text in texts]
        if not self._settings.apply_chat_template:
            return continued_ids(self._tokenizer, whole)
        # A rendered template already contains special tokens.
        ids: list[list[int]] = self._tokenizer(whole, add_special_tokens=False)["input_ids"]
        return ids

    def _end_over_limit(self, text: str) -> str:
        """Return a tail of the text with more than twice the allowed tokens, or the whole text if it has fewer tokens.

        Tokens next to the cut may differ from the tokens of the whole text. With twice the limit, the tokens that
        remain after `truncate` are far from the cut.
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
        """Return the chat of a record with the system prompt, or None for plain text."""
        settings, messages = self._settings, record.prompt
        if not settings.apply_chat_template:
            if not isinstance(messages, str):
                addition = (
                    "" if self._tokenizer.chat_template else " and data.chat_template to a file, because none exists"
                )
                raise ValueError(
                    f"prompt {index} of '{self.source}' is a list of chat messages; set data.apply_chat_template: true"
                    + addition
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
        """Return the prompt within `max_prompt_tokens`, or None for a dropped prompt."""
        length, limit = len(prompt.token_ids), self._settings.max_prompt_tokens
        where = f"prompt {prompt.index} of '{self.source}'"
        if length == 0:
            raise ValueError(
                f"{where} has no token; write the prompt in the alphabet of the tokenizer, or remove the prompt"
            )
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
        """Return the prompt with the tokenizer's prefix and the last tokens of the text, or None if the prefix alone
        reaches the limit."""
        before = self._before if prompt.token_ids[: len(self._before)] == self._before else ()
        room = self._settings.max_prompt_tokens - len(before)
        if room < 1:
            return None
        tail = prompt.token_ids[-room:]
        return replace(prompt, token_ids=(*before, *tail), text=continuation_text(self._tokenizer, tail))

    def _with_shorter_message(self, prompt: Prompt) -> Prompt | None:
        """Return the prompt, rendered again with the end of the last user message, or None if no character of the
        message fits."""
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
