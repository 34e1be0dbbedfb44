"""Settings of the chat template: its file, their rules, and notes on thinking and on the end of a turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.config.schema import Config
from megappo.errors import ConfigError, expanded, link_to_nothing, reason
from megappo.files.json_values import JSONValue
from megappo.models.chat_template import is_template
from megappo.models.end_of_turn import unmatched_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


def template_rules(config: Config) -> Iterator[str]:
    """Check that a configured template is used."""
    data = config.data
    configured = [f"data.{name}" for name in ("chat_template", "chat_template_options") if getattr(data, name)]
    if configured and not data.apply_chat_template and config.rollout.episodes is None:
        yield (
            f"{configured[0]} is given, but data.apply_chat_template is false, so no template is used; set it to true, "
            f"or remove {configured[0]}"
        )


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


def end_of_turn_notes(
    config: Config, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]
) -> Iterator[str]:
    """Warn if the chat template ends a turn of the model with a token that does not end a response.

    This is common with base models, whose only stop token ends a document. For episodes, `ChatTokens.between` raises an
    error in this case.
    """
    data, rollout = config.data, config.rollout
    if not data.apply_chat_template or not tokenizer.chat_template or rollout.episodes is not None:
        return
    end_of_turn = unmatched_end(tokenizer, stop_token_ids, rollout.stop, data.template_time)
    if end_of_turn is None:
        return
    token, text = end_of_turn
    end = repr(text) if token is None else f"token {token} {text!r}"
    remedy = f"add {text!r} to rollout.stop" if token is None else f"add {token} to rollout.stop_token_ids"
    yield (
        f"the chat template ends a turn of the model with {end}, which is no stop token and no text of rollout.stop, "
        f"so that responses continue after the end of the turn; {remedy}"
    )
