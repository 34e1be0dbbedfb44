"""Settings of a judge, a language model that reads and scores answers (`reward.judge`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import regex
from pydantic import Field, ValidationInfo, field_validator

from megappo.config.base import (
    NonNegativeFloat,
    PathOrName,
    PathText,
    PositiveInt,
    Ranks,
    Text,
    rule_of_one,
)
from megappo.config.sections.engine import ServerArguments, ServerSettings
from megappo.config.sections.own_server import OwnServerSettings, RequestSettings
from megappo.errors import expanded, link_to_nothing, shortened, show
from megappo.files.folder_texts import OF_TOKENIZERS, check_texts, read_object

FIELDS = ("question", "answer", "reference")
"""Names of the fields in braces in a prompt."""
_BRACES = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
_OWN_FIELDS = dict.fromkeys(
    ("model", "prompt", "temperature", "max_tokens"), "use the setting of the judge with this name"
) | {
    "messages": "use the setting prompt",
    "n": "only one text per request is read; remove it",
    "stream": "streams of text are not supported; remove it",
}
"""Fields of a request that `extra_body` cannot set, with the remedy."""
Template = tuple[tuple[str, str], ...]
"""Parts of a prompt: pairs of a text and the name of the field after the text. The last name is ""."""
_Score = Annotated[float, Field(ge=-1e9, le=1e9)]
_Scale = Annotated[tuple[_Score, _Score], Field(strict=False)]


class JudgeServerSettings(OwnServerSettings):
    tensor_parallel: Ranks = 1
    """Number of ranks of the server (TP). Each rank has one GPU."""
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.85
    """Share of a GPU's memory for weights, keys and values."""
    max_total_tokens: PositiveInt | None = None
    """Number of tokens in the server's key-value cache. Default: the number from memory_fraction, on a CPU 65536."""
    arguments: ServerArguments = Field(default_factory=dict)
    """Additional arguments of the server, with SGLang's names: `{context-length: 8192}`."""

    @property
    def ranks(self) -> int:
        """Number of GPUs of the server (`OwnServerSettings.ranks`)."""
        return self.tensor_parallel

    @property
    def as_servers(self) -> ServerSettings:
        """Settings of an SGLang server (`OwnServerSettings.as_servers`)."""
        own = ("tensor_parallel", "memory_fraction", "max_total_tokens", "arguments")
        return super().as_servers.model_copy(update={name: getattr(self, name) for name in own})


class JudgeSettings(RequestSettings):
    concurrency: Annotated[int, Field(gt=0, le=4096)] = 256
    """Maximum number of concurrent requests of a rank."""
    url: Text | None = None
    """Address of a running server with OpenAI's protocol, such as http://10.0.0.7:30000/v1."""
    server: JudgeServerSettings | None = None
    """SGLang server that the run starts, instead of `url`. `{}`: default settings."""
    model: PathOrName
    """Name of the judge's model in requests. For an own server, the folder of the model."""
    chat: bool = True
    """Whether the prompt is a user message in the judge's chat template. If false, the judge continues the prompt as
    text."""
    prompt: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None
    """Prompt of the judge with the fields `{question}`, `{answer}` (the response) and `{reference}` (the answer in the
    data). `{{name}}` becomes a literal `{name}`."""
    prompt_file: PathText | None = None
    """File with the prompt, instead of `prompt`."""
    pattern: Text | None = None
    """Regular expression with one group that matches a number. The last match after the judge's thoughts counts."""
    scale: _Scale | None = None
    """Minimum and maximum number of `pattern`, which become the scores 0 and 1. Default: scores are the plain
    numbers."""
    choices: dict[str, _Score] = Field(default_factory=dict)
    """Mapping of words to scores, instead of `pattern`. The last of these words after the judge's thoughts counts."""
    unreadable: _Score = 0.0
    """Score of a sample if the judge's text is truncated, or contains no number or choice."""
    temperature: NonNegativeFloat | None = 0.0
    """Sampling temperature of the judge. 0 is greedy decoding, which gives an answer the same score every time. With
    null, the field is omitted from requests, and the server's default applies."""
    max_tokens: PositiveInt | None = 512
    """Maximum length of the judge's text in tokens, including thoughts. Null: requests omit the field."""
    extra_body: dict[str, Any] | None = None
    """Additional fields of each request, such as `{max_completion_tokens: 2048}` or `{chat_template_kwargs:
    {enable_thinking: false}}`."""

    @field_validator("model")
    @classmethod
    def _expand(cls, model: str, info: ValidationInfo) -> str:
        """Expand the model folder if the run starts the server. The name of a model at a `url` stays unchanged."""
        return model if info.data.get("server") is None else expanded(model)

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of a request, except the model and the prompt."""
        fields = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {name: value for name, value in fields.items() if value is not None} | (self.extra_body or {})

    @property
    def template(self) -> Template:
        """Parts of the prompt. Raises ValueError if a file cannot be read or the prompt is invalid."""
        return _parts(self._text(), "prompt" if self.prompt_file is None else f"prompt_file '{self.prompt_file}'")

    @property
    def folder_problem(self) -> str | None:
        """Sentence about the first problem of an own server's model folder, or None if no problem is detected."""
        if self.server is None:
            return None
        folder = Path(self.model)
        if not (folder / "config.json").is_file():
            return f"model '{self.model}' is not a folder with a model (from {Path.cwd()}); give one, or a url"
        try:
            check_texts(folder, ("config.json", *OF_TOKENIZERS))
        except ValueError as error:
            return f"model: {error}"
        named = folder / "tokenizer_config.json"
        has_template = any(folder.glob("*chat_template*")) or (
            named.is_file() and "chat_template" in read_object(named)
        )
        if self.chat and not has_template:
            return f"model '{self.model}' has no chat template; set chat to false for a plain text prompt"
        return None

    def _text(self) -> str:
        if self.prompt_file is None:
            assert self.prompt is not None, "a validator requires prompt or prompt_file"
            return self.prompt
        try:
            return Path(self.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            if link := link_to_nothing(Path(self.prompt_file)):
                raise ValueError(f"prompt_file: {link}") from None
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ValueError(
                f"prompt_file '{self.prompt_file}' cannot be read ({reason}, from {Path.cwd()}); give a text file"
            ) from None

    def broken_rules(self) -> Iterator[str]:
        yield from rule_of_one("set url, or server: {} for an own server", url=self.url, server=self.server)
        yield from self.address_rules("http://HOST:PORT/v1")
        if self.server is not None and self.key is not None:
            yield "key is for a running server, but a server of the run has a generated key; remove key"
        yield from rule_of_one(prompt=self.prompt, prompt_file=self.prompt_file)
        if self.prompt is not None:
            _parts(self.prompt, "prompt")
        yield from rule_of_one(pattern=self.pattern, choices=self.choices or None)
        if self.pattern is None and self.scale is not None:
            yield "scale applies to the numbers of pattern, but choices have separate scores; remove scale"
        if self.scale is not None and self.scale[0] >= self.scale[1]:
            yield f"scale is {show(list(self.scale))}, must be increasing; give the lowest number first"
        if self.choices and (len(self.choices) < 2 or not all(choice.strip() for choice in self.choices)):
            yield f"choices are {show(self.choices)}, must be two or more words; write them as WORD: SCORE"
        if self.pattern is not None:
            _check_pattern(self.pattern)
        try:
            json.dumps(self.extra_body, allow_nan=False)
        except (TypeError, ValueError) as error:
            yield f"extra_body is not JSON ({error}); give plain numbers, texts, lists and mappings"
        for name in self.extra_body or ():
            if remedy := _OWN_FIELDS.get(name):
                yield f"extra_body has {name}; {remedy}"


def _check_pattern(pattern: str) -> None:
    try:
        groups = regex.compile(pattern).groups
    except regex.error as error:
        raise ValueError(f"pattern '{pattern}' is not a regular expression ({error}); fix it") from None
    if groups != 1:
        raise ValueError(
            f"pattern '{pattern}' has {groups} groups, must have one group around the number; write other groups as "
            "(?:...)"
        )


def _parts(text: str, name: str) -> Template:
    """Split a prompt at its fields. Raises ValueError for an unknown field and for a prompt without `{answer}`."""
    parts, literal, end = list[tuple[str, str]](), "", 0
    for match in _BRACES.finditer(text):
        literal += text[end : match.start()]
        end = match.end()
        own, field = match.groups()
        if own is not None:
            literal += f"{{{own}}}"
        elif field in FIELDS:
            parts.append((literal, field))
            literal = ""
        else:
            names = ", ".join(f"{{{name}}}" for name in FIELDS)
            word = shortened(field)
            raise ValueError(
                f"{name} has {{{word}}}, which is none of {names}; write {{{{{word}}}}} for the literal text"
            )
    if "answer" not in (field for _, field in parts):
        raise ValueError(f"{name} has no {{answer}}, so the judge would not see the answer; add {{answer}}")
    return (*parts, (literal + text[end:], ""))
