"""`megappo init`: a first configuration with comments for the devices of this machine or its cluster."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from megappo.commands import path_option, ranks_option
from megappo.config import ConfigError
from megappo.config.base import LARGEST_WORLD
from megappo.config.shipped import shipped_file
from megappo.errors import shortened
from megappo.starter.target import find_target
from megappo.starter.tasks import TASKS, StarterRequest
from megappo.starter.writing import next_commands, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megappo init`."""
    about = "; ".join(f"{name}: {description}" for name, description in TASKS.items())
    parser.add_argument("task", nargs="?", default="jsonl", choices=TASKS, metavar="TASK", help=about)
    parser.add_argument(
        "--model",
        metavar="NAME",
        type=path_option,
        help="folder or hub name (default: the largest suggested model that fits)",
    )
    parser.add_argument(
        "--data", metavar="PATH", type=path_option, help="file of prompts, or the folder of `megappo data prepare`"
    )
    parser.add_argument("--machine", metavar="NAME", help="h100, cpu, ... or a YAML file (default: this machine's)")
    parser.add_argument("--gpus", metavar="N", help="devices per node (default: all detected devices)")
    parser.add_argument("--nodes", metavar="N", help="nodes (default: 1)")
    parser.add_argument(
        "--output", metavar="FILE", type=path_option, help="configuration to write (default: TASK.yaml)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing configuration")


def run(arguments: argparse.Namespace) -> None:
    """Write the configuration, and print the files and the next commands.

    Raises ConfigError for an existing file and for invalid options.
    """
    output = _output(Path(arguments.output or f"{arguments.task}.yaml"), force=arguments.force)
    gpus, nodes = ranks_option("--gpus", arguments.gpus), ranks_option("--nodes", arguments.nodes)
    target = find_target(arguments.machine, gpus, nodes, output.parent)
    if target.ranks > LARGEST_WORLD:
        raise ConfigError(f"--gpus times --nodes is {target.ranks}, must be at most {LARGEST_WORLD}")
    if arguments.task == "lora" and target.ranks > 1 and arguments.gpus is None:
        target = target.alone()
    models = shipped_file("configs", "models")
    data, sums = _data(arguments, output), models / "tiny_arithmetic"
    request = StarterRequest(arguments.task, output.stem, arguments.model, data, sums)
    written = write(request, target, output, models)
    print(f"wrote {', '.join(map(str, written.files))} for {target.summary}")
    for note in written.notes:
        print(note)
    print("next:")
    print("\n".join(f"  {command}" for command in next_commands(request, target, output)))


def _output(output: Path, *, force: bool) -> Path:
    if output.suffix not in (".yaml", ".yml") or not re.fullmatch(r"[\w.-]+", output.stem):
        raise ConfigError(
            f"--output '{shortened(str(output))}' must end with .yaml, after a name of letters, digits, _, - and ."
        )
    if output.is_dir() or (output.exists() and not force):
        raise ConfigError(f"{output} exists already; add --force to overwrite it, or name another --output")
    return output


def _data(arguments: argparse.Namespace, output: Path) -> Path:
    if arguments.data is None:
        return output.with_name(f"{output.stem}.jsonl") if arguments.task == "jsonl" else Path("data", "gsm8k")
    data = Path(arguments.data)
    if arguments.task == "jsonl" and not data.is_file():
        raise ConfigError(f"--data '{shortened(str(data))}' is no file; give one with lines of prompt and answer")
    return data
