"""Inputs that a run reads before it builds a model: tokenizer, prompts and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megappo.config import Config
from megappo.config.role_models import load_tokenizer, role_folder, token_rows
from megappo.config.rules.experience import check_saved_tokens
from megappo.data import PromptDataset, TrainingPrompts, read_prompts
from megappo.environments.protocol import Environment
from megappo.environments.registry import make_environment
from megappo.models.model_files import resolve_stop_token_ids
from megappo.models.tokens import TokenRows


@dataclass(frozen=True)
class ModelTokens:
    """Token ids that the models of a run read and write."""

    tokenizer: PreTrainedTokenizerBase
    rows: TokenRows
    """Token ids with an embedding row in every model."""
    stop_token_ids: tuple[int, ...]
    """Token ids that end a response."""


def read_tokens(config: Config, *, training: bool = True) -> ModelTokens:
    """Read the tokenizer and the stop tokens.

    Args:
        config: settings of the run.
        training: whether all models of a run take part, or only the policy.

    Raises ConfigError if the tokens do not fit the models.
    """
    tokenizer = load_tokenizer(config)
    rows = token_rows(config, tokenizer, training=training)
    if training and config.rollout.load_from is not None:
        check_saved_tokens(tokenizer, Path(config.rollout.load_from))
    folder = role_folder(config, "actor", weights=False)
    return ModelTokens(tokenizer, rows, resolve_stop_token_ids(folder, tokenizer, config.rollout.stop_token_ids, rows))


@dataclass(frozen=True)
class RunInputs:
    """All inputs of a run except its models."""

    tokens: ModelTokens
    environment: Environment | None
    """Environment of episodes. None means that responses are scored directly."""
    training: TrainingPrompts
    validation: Mapping[str, PromptDataset]
    """Prompts of each validation set by its name (see `DataSettings.evaluated`)."""

    @property
    def reads_clock(self) -> bool:
        """Whether prompts contain the time that a chat template inserted (`data.template_time`)."""
        return any(prompts.reads_clock for prompts in (self.training, *self.validation.values()))


def read_inputs(config: Config, *, training: bool = True, validation: bool | None = None) -> RunInputs:
    """Read and tokenize all inputs.

    Args:
        config: settings of the run.
        training: see `read_tokens`.
        validation: whether to read validation sets; None: only if the settings or an evaluation use them.

    Raises ValueError if an input cannot be read or created.
    """
    tokens, episodes = read_tokens(config, training=training), config.rollout.episodes
    environment = None if episodes is None else make_environment(episodes)
    schemas = getattr(environment, "schemas", [])
    prompts = read_prompts(config.data, tokens.tokenizer, schemas, tokens.rows)
    if validation is None:
        validation = config.evaluation is not None or not training
    sets = config.data.evaluated if validation else {}
    read = {
        name: PromptDataset(source, config.data, tokens.tokenizer, schemas, rows=tokens.rows)
        for name, source in sets.items()
    }
    return RunInputs(tokens, environment, prompts, read)
