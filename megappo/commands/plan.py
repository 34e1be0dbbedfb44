"""`megappo plan`: what a configuration needs, before anything is queued."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from megappo.commands import add_config_arguments, add_machine_arguments, ranks_option
from megappo.config import ConfigError, load_config
from megappo.plan.choices import choices
from megappo.plan.engines import other_engine
from megappo.plan.planner import models_beside, planning
from megappo.plan.search import best_layouts, remedy
from megappo.plan.tables import plan_view, search_view, to_json
from megappo.runtime.packages import show_torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What follows `megappo plan`."""
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--search", action="store_true", help="propose the fastest layouts for these devices instead")
    add_machine_arguments(parser)
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> bool:
    """`megappo plan`: print the plan of a configuration, or the fastest layouts for it; whether it fits.

    Raises ConfigError for settings that cannot run, an unknown machine or number of devices, and a search that finds
    nothing.
    """
    config, as_json = load_config(arguments.config, arguments.overrides), arguments.json
    if config.model.trust_remote_code:
        show_torch()
    asked = ranks_option("--gpus", arguments.gpus)
    found = planning(config, arguments.machine, asked, models_beside(arguments.config))
    models, machine, gpus = found.models, found.machine, found.gpus
    console = Console(file=sys.stdout)  # rich detects the encoding of a file only if the file is given
    if arguments.search:
        layouts = best_layouts(config, models, machine, gpus)
        if not layouts:
            raise ConfigError(remedy(config, models, machine, gpus)[0])
        if as_json:
            print(to_json(None, layouts, found.notes))
        else:
            console.print(search_view(layouts, gpus, machine.name))
        return True
    plan = found.plan
    other = other_engine(config, models, machine, gpus)
    chosen = list(choices(config, gpus, on_cuda=machine.is_cuda))
    advice, proposal = (None, None) if plan.fits else remedy(config, models, machine, gpus)
    if as_json:
        notes = [*found.notes, *([advice] if advice else [])]
        print(to_json(plan, [proposal] if proposal else [], notes, other, chosen))
    else:
        console.print(plan_view(plan))
        # Sentences go out unwrapped, so that overrides can be copied.
        answer = [plan.verdict, advice, plan.bottleneck, other.sentence, plan.stopping.sentence(config)]
        print("\n".join(line for line in (*answer, *found.notes, plan.assumptions) if line))
        if chosen:
            print("chosen where the configuration says nothing:")
            print("\n".join(f"  {choice.sentence}" for choice in chosen))
    return plan.fits
