"""Chat template of a run, from the tokenizer or from `data.chat_template`, with `data.chat_template_options` applied.

The options become the first lines of the template. All code that renders with the tokenizer therefore uses the options,
and an exported model contains them. A caller of the exported template can override the options.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.errors import ConfigError, reason
from megappo.files.folder_texts import read_object
from megappo.files.json_values import JSONValue
from megappo.models.tokens import rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def is_template(text: str) -> bool:
    """Return whether a text is a chat template rather than a path."""
    return "{{" in text or "{%" in text


def set_template(tokenizer: PreTrainedTokenizerBase, own: str | None, options: Mapping[str, JSONValue]) -> None:
    """Set the run's template in a tokenizer.

    Args:
        tokenizer: the tokenizer that is changed.
        own: template of the run (`data.chat_template`); None: the tokenizer's.
        options: values of the template's variables (`data.chat_template_options`).

    Raises ConfigError if the template is missing or does not compile.
    """
    if own is None and not options:
        return
    template = tokenizer.chat_template if own is None else own
    if not template:
        raise ConfigError(
            "data.chat_template_options is given, but the tokenizer has no chat template; set data.chat_template"
        )
    for name in options:
        if name in tokenizer.special_tokens_map:
            raise ConfigError(
                f"data.chat_template_options has {name}, which is a token: {tokenizer.special_tokens_map[name]}; "
                "remove it, or write the token into data.chat_template"
            )
    head = "".join(map(_set_option, options.items()))
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
