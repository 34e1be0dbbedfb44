"""The chat template of a run: the tokenizer's, or that of `data.chat_template`, with what `data.chat_template_options`
tell it.

The options become the first lines of the template itself, so that everything that renders with the tokenizer renders
alike, an exported model too. A caller of the exported template can still set them to other values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.config.data import is_template
from megappo.config.folder_texts import read_object
from megappo.config.tokens import rendered
from megappo.errors import ConfigError, expanded, link_to_nothing, reason
from megappo.observe.json_values import JSONValue

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megappo.config.data import DataSettings
    from megappo.config.schema import Config

THINKING_SWITCH = "enable_thinking"
"""The option of Qwen3's, GLM-4.5's and SmolLM3's templates, which have models think where it is not given."""
SHORT_RESPONSE_TOKENS = 4096
"""Response limit, in tokens, up to which a model that thinks is mostly cut before it answers: Qwen3's authors advise
32,768."""


def read_template(settings: dict[str, JSONValue], folder: Path) -> None:
    """Replace a file name in `data.chat_template` by the file's text; the file is looked for in `folder`, then in the
    working directory. Raises ConfigError for a file that cannot be read. A value that is neither a file nor a template
    is left for validation to refuse."""
    data = settings.get("data")
    if not isinstance(data, dict) or not isinstance(given := data.get("chat_template"), str) or is_template(given):
        return
    given = expanded(given, "data.chat_template")
    found = next((place for place in (folder / given, Path(given)) if place.is_file()), None)
    if found is None:
        if link := link_to_nothing(folder / given) or link_to_nothing(Path(given)):
            raise ConfigError(f"data.chat_template: {link}")
        return
    try:
        text = found.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template {found} cannot be read: {reason(error)}; save it as UTF-8") from None
    if not is_template(text):
        raise ConfigError(f"data.chat_template {found} holds no template, which has {{{{ or {{%; name another file")
    data["chat_template"] = text


def set_template(tokenizer: PreTrainedTokenizerBase, data: DataSettings) -> None:
    """Give a tokenizer the run's template. Raises ConfigError where that does not compile, or there is none."""
    if data.chat_template is None and not data.chat_template_options:
        return
    template = tokenizer.chat_template if data.chat_template is None else data.chat_template
    if not template:
        raise ConfigError(
            "data.chat_template_options is given, and the tokenizer has no chat template; set data.chat_template"
        )
    for name in data.chat_template_options:
        if name in tokenizer.special_tokens_map:
            raise ConfigError(
                f"data.chat_template_options has {name}, which is a token: {tokenizer.special_tokens_map[name]}; "
                "remove it, or write the token into data.chat_template"
            )
    head = "".join(map(_told, data.chat_template_options.items()))
    named = template if isinstance(template, dict) else {"": template}
    told = {name: head + str(text) for name, text in named.items()}
    tokenizer.chat_template = told if isinstance(template, dict) else told[""]
    _check_syntax(tokenizer, head.count("\n"))


def _told(option: tuple[str, JSONValue]) -> str:
    """The line that sets an option where nothing else does; `trim_blocks`, with which transformers renders, takes the
    end of the line away."""
    name, value = option
    return f"{{% if {name} is not defined or {name} is none %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}\n"


def _literal(value: JSONValue) -> str:
    """A value of the settings in Jinja's words."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)


def _check_syntax(tokenizer: PreTrainedTokenizerBase, own_lines: int) -> None:
    """Raise ConfigError for a template that does not compile. Whether it renders the data's messages is seen when the
    data are read."""
    from jinja2 import TemplateSyntaxError

    try:
        rendered(tokenizer, [{"role": "user", "content": "a"}], goes_on=True)
    except TemplateSyntaxError as error:
        line = max(error.lineno - own_lines, 0)
        where = f"line {line}" if line else "data.chat_template_options"
        raise ConfigError(f"data.chat_template does not compile ({where}: {reason(error)}); fix it") from None
    except Exception:  # noqa: BLE001 - a template may refuse this conversation, and none of the run's
        return


def template_rules(config: Config) -> Iterator[str]:
    """A template that is given is used."""
    data = config.data
    given = [f"data.{name}" for name in ("chat_template", "chat_template_options") if getattr(data, name)]
    if given and not data.apply_chat_template and config.rollout.episodes is None:
        yield (
            f"{given[0]} is given, and nothing is rendered with data.apply_chat_template false; set that to true, or "
            f"remove {given[0]}"
        )


def template_in(folder: Path) -> str:
    """The template of a tokenizer's folder, of which transformers prefers the file; "" where there is none to read."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file() and (found := read_object(folder / name).get("chat_template")):
            return str(found)
    return ""


def thinking_notes(config: Config, template: str) -> Iterator[str]:
    """A note on a model that thinks before it answers because its template is not told otherwise, and has little room
    for it."""
    data, most = config.data, config.rollout.max_response_tokens
    template = data.chat_template or template
    if not data.apply_chat_template or THINKING_SWITCH not in template or most > SHORT_RESPONSE_TOKENS:
        return
    if THINKING_SWITCH not in data.chat_template_options:
        yield (
            f"the chat template has the switch {THINKING_SWITCH}, which is not set, so that Qwen3 thinks, and "
            f"rollout.max_response_tokens {most} is little for a model that does; set data.chat_template_options."
            f"{THINKING_SWITCH}=false, or to true with more than {SHORT_RESPONSE_TOKENS} tokens"
        )
