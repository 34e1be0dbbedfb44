"""Settings of a judge: a language model that reads answers and says what they are worth (`reward.judge`)."""

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
    NonNegativeInt,
    PathOrName,
    PathText,
    PositiveInt,
    Ranks,
    Seconds,
    Settings,
    Text,
    rule_of_one,
)
from megappo.config.engine import ServerArguments, SGLangSettings
from megappo.config.folder_texts import OF_TOKENIZERS, check_texts, read_object
from megappo.config.own_server import OwnServerSettings
from megappo.errors import expanded, link_to_nothing, shortened, show

FIELDS = ("question", "answer", "reference")
"""Names of fields that can appear in braces in a prompt."""
_BRACES = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
_OWN_FIELDS = dict.fromkeys(
    ("model", "prompt", "temperature", "max_tokens"), "use the judge's setting of this name"
) | {
    "messages": "use the setting prompt",
    "n": "one text of a judge is read; remove it",
    "stream": "a judge's text is read as a whole; remove it",
}
"""Fields of a request that `extra_body` cannot set, with the remedy."""
Template = tuple[tuple[str, str], ...]
"""Texts of a prompt, each with the name of the field that follows it, "" at the end."""
_Score = Annotated[float, Field(ge=-1e9, le=1e9)]
_Scale = Annotated[tuple[_Score, _Score], Field(strict=False)]


class JudgeServerSettings(OwnServerSettings):
    tensor_parallel: Ranks = 1
    """Ranks of the server (TP), each with a GPU of its own."""
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.85
    """Share of a GPU's memory for weights, keys and values."""
    max_total_tokens: PositiveInt | None = None
    """Tokens whose keys and values the server holds; default: what memory_fraction allows, on a CPU 65536."""
    arguments: ServerArguments = Field(default_factory=dict)
    """Further arguments of the server, by SGLang's names: `{context-length: 8192}`."""

    @property
    def ranks(self) -> int:
        """See `OwnServerSettings.ranks`."""
        return self.tensor_parallel

    @property
    def as_servers(self) -> SGLangSettings:
        """See `OwnServerSettings.as_servers`."""
        own = ("tensor_parallel", "memory_fraction", "max_total_tokens", "arguments")
        return super().as_servers.model_copy(update={name: getattr(self, name) for name in own})


class JudgeSettings(Settings):
    url: Text | None = None
    """A server that runs already and speaks OpenAI's protocol, such as http://10.0.0.7:30000/v1."""
    server: JudgeServerSettings | None = None
    """An SGLang server that the run starts, in place of `url`; `{}`: with its defaults."""
    model: PathOrName
    """The name under which the server knows the judge's model; of an own server the model's folder."""
    key: Text | None = None
    """The environment variable that holds the server's key; a server that the run starts has a key of the run."""
    chat: bool = True
    """The prompt is a user's message, in the chat template of the judge's model; false: the text that it continues."""
    prompt: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None
    """Text that the judge is asked, with `{question}`, `{answer}` (the response) and `{reference}` (the data's answer)
    in it. `{{name}}` stands for a literal `{name}`."""
    prompt_file: PathText | None = None
    """A file with the text, in place of `prompt`."""
    pattern: Text | None = None
    """A regular expression with one group, which matches a number; the last match after the judge's thoughts counts."""
    scale: _Scale | None = None
    """Lowest and highest number that `pattern` may find, which become the scores 0 and 1. Default: any number, as it
    is."""
    choices: dict[str, _Score] = Field(default_factory=dict)
    """Words and the score of each word, in place of `pattern`. The last of these words after the judge's thoughts
    counts."""
    unreadable: _Score = 0.0
    """Score of a sample if the judge's text is truncated, or contains no number or choice."""
    temperature: NonNegativeFloat | None = 0.0
    """Sampling temperature of the judge. 0 is greedy decoding, which gives an answer the same score every time. With
    null, the field is omitted from requests, and the server's default applies."""
    max_tokens: PositiveInt | None = 512
    """Longest text of the judge, thoughts included, in tokens; null: requests leave the field out."""
    extra_body: dict[str, Any] | None = None
    """Further fields of each request, such as `{max_completion_tokens: 2048}` or `{chat_template_kwargs:
    {enable_thinking: false}}`."""
    concurrency: Annotated[int, Field(gt=0, le=4096)] = 256
    """Most requests of a rank at the same time."""
    timeout_seconds: Seconds = 120.0
    """Longest time of a request, tries included, after which its sample has failed."""
    retries: NonNegativeInt = 10
    """Maximum number of retries of a failed request, with increasing delays, within `timeout_seconds`."""

    @field_validator("model")
    @classmethod
    def _expand(cls, model: str, info: ValidationInfo) -> str:
        """Expands the model folder if the run starts the server. At a `url`, the name of the model is kept as is."""
        return model if info.data.get("server") is None else expanded(model)

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of a request, except the model and the prompt."""
        given = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {name: value for name, value in given.items() if value is not None} | (self.extra_body or {})

    @property
    def template(self) -> Template:
        """The prompt in parts. Raises ValueError for a file that cannot be read or is no prompt for a judge."""
        return _parts(self._text(), "prompt" if self.prompt_file is None else f"prompt_file '{self.prompt_file}'")

    @property
    def folder_problem(self) -> str | None:
        """What the model of an own server lacks; None where it seems whole."""
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
            return f"model '{self.model}' has no chat template; set chat to false, and the prompt is continued"
        return None

    def _text(self) -> str:
        if self.prompt_file is None:
            assert self.prompt is not None, "a validator saw to it"
            return self.prompt
        try:
            return Path(self.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            if link := link_to_nothing(Path(self.prompt_file)):
                raise ValueError(f"prompt_file: {link}") from None
            words = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ValueError(
                f"prompt_file '{self.prompt_file}' cannot be read ({words}, from {Path.cwd()}); give a file of text"
            ) from None

    def broken_rules(self) -> Iterator[str]:
        yield from rule_of_one("give url, or server: {} for one of the run's own", url=self.url, server=self.server)
        if self.url is not None:
            yield from address_rules(self.url, self.key, "http://HOST:PORT/v1")
        if self.server is not None and self.key is not None:
            yield "key is for a server that runs already, one of the run's own has its own; remove it"
        yield from rule_of_one(prompt=self.prompt, prompt_file=self.prompt_file)
        if self.prompt is not None:
            _parts(self.prompt, "prompt")
        yield from rule_of_one(pattern=self.pattern, choices=self.choices or None)
        if self.pattern is None and self.scale is not None:
            yield "scale is for the numbers of pattern, choices have scores of their own; remove it"
        if self.scale is not None and self.scale[0] >= self.scale[1]:
            yield f"scale is {show(list(self.scale))}, must rise; give its lowest number first"
        if self.choices and (len(self.choices) < 2 or not all(choice.strip() for choice in self.choices)):
            yield f"choices are {show(self.choices)}, must be two or more words; write them as WORD: SCORE"
        if self.pattern is not None:
            _check_pattern(self.pattern)
        try:
            json.dumps(self.extra_body, allow_nan=False)
        except (TypeError, ValueError) as error:
            yield f"extra_body is no JSON ({error}); give plain numbers, texts, lists and mappings"
        for name in self.extra_body or ():
            if remedy := _OWN_FIELDS.get(name):
                yield f"extra_body has {name}; {remedy}"


def address_rules(url: str, key: str | None, like: str) -> Iterator[str]:
    """Rules: the address of a server, and the name of the variable with its key rather than the key."""
    if not re.match(r"https?://[^/\s]+", url):
        yield f"url is '{url}', must look like {like}; change it"
    if key is not None and not re.fullmatch(r"[A-Za-z_]\w*", key):
        yield "key is no name of an environment variable; give the name of one that holds the key"


def _check_pattern(pattern: str) -> None:
    try:
        groups = regex.compile(pattern).groups
    except regex.error as error:
        raise ValueError(f"pattern '{pattern}' is no regular expression ({error}); fix it") from None
    if groups != 1:
        raise ValueError(
            f"pattern '{pattern}' has {groups} groups, must have one, around the number; (?:...) groups nothing"
        )


def _parts(text: str, name: str) -> Template:
    """A text cut at its fields. Raises ValueError for a field that there is not, and where the answer is none."""
    parts, literal, end = list[tuple[str, str]](), "", 0
    for found in _BRACES.finditer(text):
        literal += text[end : found.start()]
        end = found.end()
        own, field = found.groups()
        if own is not None:
            literal += f"{{{own}}}"
        elif field in FIELDS:
            parts.append((literal, field))
            literal = ""
        else:
            names = ", ".join(f"{{{name}}}" for name in FIELDS)
            word = shortened(field)
            raise ValueError(
                f"{name} has {{{word}}}, which is none of {names}; write {{{{{word}}}}} for the word itself"
            )
    if "answer" not in (field for _, field in parts):
        raise ValueError(f"{name} has no {{answer}}, so that the judge would not see what it judges; add it")
    return (*parts, (literal + text[end:], ""))
