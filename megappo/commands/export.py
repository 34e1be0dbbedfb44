"""`megappo export`: a checkpoint of a run as a Hugging Face folder or as a Megatron-LM checkpoint."""

from __future__ import annotations

import argparse

from megappo.api.functions import export
from megappo.checkpoint.exports.export import FORMATS, ROLES
from megappo.commands import path_option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megappo export`."""
    parser.add_argument("run_directory", metavar="RUN_DIR", type=path_option, help="directory of the run")
    parser.add_argument("out", metavar="OUT", type=path_option, help="folder to write")
    parser.add_argument("--role", choices=ROLES, default="actor", help="(default: %(default)s)")
    parser.add_argument(
        "--step", metavar="N", default="latest", help="step of the checkpoint, best or latest (default: %(default)s)"
    )
    parser.add_argument(
        "--format", dest="form", choices=FORMATS, default=FORMATS[0],
        help="torch_dist: for Megatron-LM; peft: adapters alone (default: %(default)s, adapters merged)",
    )  # fmt: skip
    parser.add_argument(
        "--without-mtp", action="store_true",
        help="leave out the weights of layers that predict additional tokens, which come from the folder of the model",
    )  # fmt: skip
    parser.add_argument(
        "--push-to-hub",
        metavar="OWNER/NAME",
        help="upload the result to the Hugging Face hub as a private model",
    )
    parser.add_argument("--public", action="store_true", help="make the model on the hub public")
    parser.add_argument("--family", metavar="NAME", help="model.family of the run, whose code is imported")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code in the folders of the run's model and tokenizer"
    )


def run(arguments: argparse.Namespace) -> None:
    """Export, and print notes for the user."""
    options = {name: value for name, value in vars(arguments).items() if name != "command"}
    print("\n".join(export(**options)))  # each argument is a parameter of `export`
