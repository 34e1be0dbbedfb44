"""Chat template of a run, from the tokenizer or from `data.chat_template`, with `data.chat_template_options` applied.

The options become the first lines of the template. All code that renders with the tokenizer therefore uses the options,
and an exported model contains them. A caller of the exported template can override the options.
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
"""Option of the templates of Qwen3, GLM-4.5 and SmolLM3. Models with these templates think if the option is not set."""
SHORT_RESPONSE_TOKENS = 4096
"""Response limit in tokens. Up to this limit, most responses of a thinking model are truncated before the answer.
Qwen3's authors recommend 32,768 tokens."""


def read_template(settings: dict[str, JSONValue], folder: Path) -> None:
    """Replace a file name in `data.chat_template` by the text of the file.

    The file is searched in `folder`, then in the working directory. A value that is neither a file nor a template is
    left unchanged and rejected by validation.

    Raises ConfigError if the file cannot be read.
    """
    data = settings.get("data")
    if not isinstance(data, dict) or not isinstance(value := data.get("chat_template"), str) or is_template(value):
        return
    value = expanded(value, "data.chat_template")
    path = next((place for place in (folder / value, Path(value)) if place.is_file()), None)
    if path is None:
        if link := link_to_nothing(folder / value) or link_to_nothing(Path(value)):
            raise ConfigError(f"data.chat_template: {link}")
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template {path} cannot be read: {reason(error)}; save it as UTF-8") from None
    if not is_template(text):
        raise ConfigError(f"data.chat_template {path} holds no template with {{{{ or {{%; name another file")
    data["chat_template"] = text


def set_template(tokenizer: PreTrainedTokenizerBase, data: DataSettings) -> None:
    """Set the run's template in a tokenizer. Raises ConfigError if the template is missing or does not compile."""
    if data.chat_template is None and not data.chat_template_options:
        return
    template = tokenizer.chat_template if data.chat_template is None else data.chat_template
    if not template:
        raise ConfigError(
            "data.chat_template_options is given, but the tokenizer has no chat template; set data.chat_template"
        )
    for name in data.chat_template_options:
        if name in tokenizer.special_tokens_map:
            raise ConfigError(
                f"data.chat_template_options has {name}, which is a token: {tokenizer.special_tokens_map[name]}; "
                "remove it, or write the token into data.chat_template"
            )
    head = "".join(map(_set_option, data.chat_template_options.items()))
    named = template if isinstance(template, dict) else {"": template}
    templates = {name: head + str(text) for name, text in named.items()}
    tokenizer.chat_template = templates if isinstance(template, dict) else templates[""]
    _check_syntax(tokenizer, head.count("\n"))


def _set_option(option: tuple[str, JSONValue]) -> str:
    """Return a template line that sets an option to its value if the caller does not set the option.

    The line adds no newline to the output, because transformers renders with `trim_blocks`.
    """
    name, value = option
    return f"{{% if {name} is not defined or {name} is none %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}\n"


def _literal(value: JSONValue) -> str:
    """Format a value of the settings as a Jinja literal."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)


def _check_syntax(tokenizer: PreTrainedTokenizerBase, own_lines: int) -> None:
    """Raise ConfigError for a template that does not compile. Messages of the data are rendered only when data are
    read."""
    from jinja2 import TemplateSyntaxError

    try:
        rendered(tokenizer, [{"role": "user", "content": "a"}], goes_on=True)
    except TemplateSyntaxError as error:
        line = max(error.lineno - own_lines, 0)
        where = f"line {line}" if line else "data.chat_template_options"
        raise ConfigError(f"data.chat_template does not compile ({where}: {reason(error)}); fix it") from None
    except Exception:  # noqa: BLE001 - a template may reject this test conversation but accept those of the run
        return


def template_rules(config: Config) -> Iterator[str]:
    """Check that a configured template is used."""
    data = config.data
    configured = [f"data.{name}" for name in ("chat_template", "chat_template_options") if getattr(data, name)]
    if configured and not data.apply_chat_template and config.rollout.episodes is None:
        yield (
            f"{configured[0]} is given, but data.apply_chat_template is false, so no template is used; set it to true, "
            f"or remove {configured[0]}"
        )


def template_in(folder: Path) -> str:
    """Return the template of a tokenizer's folder, or "" if no template can be read. As in transformers, the file
    `chat_template.jinja` has precedence."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file() and (template := read_object(folder / name).get("chat_template")):
            return str(template)
    return ""


def thinking_notes(config: Config, template: str) -> Iterator[str]:
    """Warn about a model that thinks by default if the response limit is too short for thinking."""
    data, most = config.data, config.rollout.max_response_tokens
    template = data.chat_template or template
    if not data.apply_chat_template or THINKING_SWITCH not in template or most > SHORT_RESPONSE_TOKENS:
        return
    if THINKING_SWITCH not in data.chat_template_options:
        yield (
            f"the chat template has the switch {THINKING_SWITCH}, which is not set, so that Qwen3 thinks, but "
            f"rollout.max_response_tokens {most} is too low for a model that thinks; set data.chat_template_options."
            f"{THINKING_SWITCH}=false, or to true with more than {SHORT_RESPONSE_TOKENS} tokens"
        )
