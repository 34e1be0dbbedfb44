"""`megappo plan`: what a configuration needs, before anything is queued."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from megappo.commands import add_config_arguments, add_machine_arguments, whole_option
from megappo.config import Config, ConfigError, load_config
from megappo.config.base import LARGEST_WORLD
from megappo.plan.engines import other_engine
from megappo.plan.machine_file import find_machine
from megappo.plan.planner import default_machine, fewest_ranks, make_plan, read_models
from megappo.plan.search import best_layouts, remedy
from megappo.plan.tables import plan_view, search_view, to_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What follows `megappo plan`."""
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--search", action="store_true", help="propose the fastest layouts for these devices instead")
    add_machine_arguments(parser)
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> bool:
    """`megappo plan`; whether the run fits."""
    return plan_command(
        load_config(arguments.config, arguments.overrides),
        arguments.config,
        machine_name=arguments.machine,
        gpus_text=arguments.gpus,
        as_json=arguments.json,
        search=arguments.search,
    )


def plan_command(
    config: Config,
    config_path: str,
    *,
    machine_name: str | None = None,
    gpus_text: str | None = None,
    as_json: bool = False,
    search: bool = False,
) -> bool:
    """Print the plan of a configuration from a file, or with `search` the fastest layouts for it; whether it fits.

    Raises ConfigError for settings that cannot run, an unknown machine or number of devices, and a search that finds
    nothing.
    """
    machine = default_machine(config) if machine_name is None else find_machine(machine_name)
    gpus = fewest_ranks(config) if gpus_text is None else whole_option("--gpus", gpus_text, 1, LARGEST_WORLD)
    found = read_models(config, Path(config_path).parent / "models")
    console = Console()
    if search:
        layouts = best_layouts(config, found.models, machine, gpus)
        if not layouts:
            raise ConfigError(remedy(config, found.models, machine, gpus)[0])
        if as_json:
            print(to_json(None, layouts, found.notes))
        else:
            console.print(search_view(layouts, gpus, machine.name))
        return True
    plan = make_plan(config, found.models, machine, gpus)
    other = other_engine(config, found.models, machine, gpus)
    advice, proposal = (None, None) if plan.fits else remedy(config, found.models, machine, gpus)
    if as_json:
        print(to_json(plan, [proposal] if proposal else [], [*found.notes, *([advice] if advice else [])], other))
    else:
        console.print(plan_view(plan))
        # Sentences go out unwrapped, so that overrides can be copied.
        for line in (
            plan.verdict,
            *([advice] if advice else []),
            plan.bottleneck,
            other.sentence,
            plan.stopping.sentence(config),
        ):
            print(line)
        for line in (*found.notes, plan.assumptions):
            print(line)
    return plan.fits
