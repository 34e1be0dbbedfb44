"""`megappo plan`: the resources that a configuration needs, before a job is queued."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from megappo.commands import add_config_arguments, add_machine_arguments, ranks_option
from megappo.config import ConfigError, load_config
from megappo.plan.choices import choices
from megappo.plan.engines import other_engine
from megappo.plan.planner import local_models_folder, planning
from megappo.plan.search import best_layouts, remedy
from megappo.plan.tables import plan_view, search_view, to_json
from megappo.runtime.packages import show_torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megappo plan`."""
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--search", action="store_true", help="propose the fastest layouts for these devices instead")
    add_machine_arguments(parser)
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> bool:
    """Print the plan of a configuration, or the fastest layouts for it. Return whether the run fits.

    Raises ConfigError for invalid settings, an unknown machine, an invalid number of devices, and a search without a
    result.
    """
    config, as_json = load_config(arguments.config, arguments.overrides), arguments.json
    if config.model.trust_remote_code:
        show_torch()
    requested_gpus = ranks_option("--gpus", arguments.gpus)
    proposed = planning(config, arguments.machine, requested_gpus, local_models_folder(arguments.config))
    models, machine, gpus = proposed.models, proposed.machine, proposed.gpus
    console = Console(file=sys.stdout)  # rich detects the encoding of a file only if the file is given
    if arguments.search:
        layouts = best_layouts(config, models, machine, gpus)
        if not layouts:
            raise ConfigError(remedy(config, models, machine, gpus)[0])
        if as_json:
            print(to_json(None, layouts, proposed.notes))
        else:
            console.print(search_view(layouts, gpus, machine.name))
        return True
    plan = proposed.plan
    other = other_engine(config, models, machine, gpus)
    chosen = list(choices(config, gpus, on_cuda=machine.is_cuda))
    advice, proposal = (None, None) if plan.fits else remedy(config, models, machine, gpus)
    if as_json:
        notes = [*proposed.notes, *([advice] if advice else [])]
        print(to_json(plan, [proposal] if proposal else [], notes, other, chosen))
    else:
        console.print(plan_view(plan))
        # Sentences are not wrapped, so that overrides can be copied.
        reason = "the fewest that the layouts need; --gpus N plans another number"
        assumed = f" (planned for {gpus} x {machine.name}, {reason})" if requested_gpus is None else ""
        answer = [plan.verdict + assumed, advice, plan.bottleneck, other.sentence, plan.stopping.sentence(config)]
        print("\n".join(line for line in (*answer, *proposed.notes, plan.assumptions) if line))
        if chosen:
            print("chosen for settings that the configuration omits:")
            print("\n".join(f"  {choice.sentence}" for choice in chosen))
    return plan.fits
