"""`megappo eval`: score a model on `data.validation` and `data.validation_sets`."""

from __future__ import annotations

import argparse

from megappo.commands import add_config_arguments
from megappo.commands.start import start
from megappo.config import Config, ConfigError, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What follows `megappo eval`."""
    parser.add_argument("--weights", metavar="DIR", help="Hugging Face folder to score instead of model.path")
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Evaluate on all ranks; rank 0 prints the metrics."""
    start("eval", _for_evaluation(load_config(arguments.config, arguments.overrides), arguments.weights))


def _for_evaluation(config: Config, weights: str | None) -> Config:
    """The settings with `weights` in the model's place; the tokenizer stays the model's."""
    if not config.data.evaluated:
        raise ConfigError("eval needs prompts; add data.validation or data.validation_sets")
    if weights is None:
        return config
    tokenizer = config.model.tokenizer or config.model.path
    model = config.model.model_copy(update={"path": weights, "init": "pretrained", "tokenizer": tokenizer})
    actor = config.actor.model_copy(update={"start_from": None})
    return config.model_copy(update={"model": model, "actor": actor})
