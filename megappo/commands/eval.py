"""`megappo eval`: scores of a model on `data.validation` and `data.validation_sets`."""

from __future__ import annotations

import argparse

from megappo.api.functions import evaluate
from megappo.commands import add_config_arguments, path_option
from megappo.config import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megappo eval`."""
    parser.add_argument(
        "--weights", metavar="DIR", type=path_option, help="Hugging Face folder to score instead of model.path"
    )
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Evaluate on all ranks. Rank 0 prints the metrics."""
    evaluate(load_config(arguments.config, arguments.overrides), weights=arguments.weights)
