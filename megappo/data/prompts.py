"""Tokenised prompts."""

from __future__ import annotations

import hashlib
import json

from transformers import PreTrainedTokenizerBase

from megappo.config.schema import DataSettings, DataSourceSettings
from megappo.data.sources import Record, read_records
from megappo.types import Prompt


class PromptDataset:
    """The prompts of a source as the model sees them; over-long ones are dropped, cut or refused, and counted."""

    def __init__(self, source: DataSourceSettings, settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read and tokenise everything. Raises ValueError for unusable data, or where nothing is left."""
        self._settings, self._tokenizer, self._source = settings, tokenizer, source.source
        if settings.apply_chat_template and not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; set data.apply_chat_template: false")
        self.dropped = 0
        self.truncated = 0
        self._prompts: list[Prompt] = []
        for index, record in enumerate(read_records(source)):
            prompt = self._tokenise(index, record)
            if prompt is not None:
                self._prompts.append(prompt)
        if not self._prompts:
            raise ValueError(
                f"all {self.dropped} prompts of '{source.source}' are longer than data.max_prompt_tokens "
                f"{settings.max_prompt_tokens}; raise it, or set data.overlong_prompts: truncate"
            )
        self.fingerprint = self._fingerprint()

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, position: int) -> Prompt:
        return self._prompts[position]

    def _tokenise(self, index: int, record: Record) -> Prompt | None:
        text = self._render(index, record)
        # A rendered template holds its special tokens already.
        ids = self._tokenizer(text, add_special_tokens=not self._settings.apply_chat_template).input_ids
        limit = self._settings.max_prompt_tokens
        if len(ids) > limit:
            match self._settings.overlong_prompts:
                case "error":
                    raise ValueError(
                        f"prompt {index} of '{self._source}' has {len(ids)} tokens, more than data.max_prompt_tokens "
                        f"{limit}; raise it, or set data.overlong_prompts: drop"
                    )
                case "drop":
                    self.dropped += 1
                    return None
            self.truncated += 1
            ids = ids[-limit:]
            text = self._tokenizer.decode(ids)
        return Prompt(index, tuple(ids), text, record.answer, record.metadata)

    def _render(self, index: int, record: Record) -> str:
        settings = self._settings
        if not settings.apply_chat_template:
            if not isinstance(record.prompt, str):
                raise ValueError(
                    f"prompt {index} of '{self._source}' is a list of chat messages; set data.apply_chat_template: true"
                )
            return record.prompt
        messages = record.prompt
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if settings.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": settings.system_prompt}, *messages]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(json.dumps([prompt.token_ids, prompt.answer]).encode())
        return digest.hexdigest()
