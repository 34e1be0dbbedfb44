"""Searches the layout of a new configuration, writes the file and what it names, and says what comes next."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megappo.config import ConfigError, load_config
from megappo.config.start_lines import command_line, sbatch_line, training_line
from megappo.plan.planner import planning
from megappo.plan.search import Proposal, best_layouts, remedy
from megappo.starter.commented_yaml import Setting, overridden, to_yaml
from megappo.starter.target import RunTarget
from megappo.starter.tasks import EXAMPLE_LINES, EXAMPLE_REWARD, TASKS, StarterRequest, models, settings_of

_LAYOUT = "by the search of `megappo plan --search`"


@dataclass(frozen=True)
class Written:
    """What was written."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]
    """From where models were read that are not on this machine."""


def write(request: StarterRequest, target: RunTarget, output: Path, beside: Path) -> Written:
    """Write the configuration of a task, and the example files that it names where they are not there.

    `beside`: a folder with the config.json of models that are not on this machine. Raises ConfigError where no model
    fits the target, and for a model that cannot be read.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = output.with_name(f".{output.stem}.{os.getpid()}.yaml")
    try:
        for model in models(request, target):
            settings = settings_of(request, target, model)
            draft.write_text(to_yaml(settings), encoding="utf-8")
            found = planning(load_config(draft), None, target.ranks, beside)
            layouts = best_layouts(found.config, found.models, target.machine, target.ranks, count=1)
            if layouts:
                chosen = overridden(settings, map(_setting, layouts[0].overrides))
                draft.write_text(_head(request, target, output, layouts[0]) + to_yaml(chosen), encoding="utf-8")
                load_config(draft)
                files = [file for file, text in _examples(request, output) if _written_once(file, text)]
                draft.replace(output)
                return Written((output, *files), found.notes)
        raise ConfigError(remedy(found.config, found.models, target.machine, target.ranks)[0])
    finally:
        draft.unlink(missing_ok=True)


def _setting(override: str) -> Setting:
    key, _, value = override.partition("=")
    return Setting(key, yaml.safe_load(value), _LAYOUT)


def _examples(request: StarterRequest, output: Path) -> Iterator[tuple[Path, str]]:
    if request.task == "jsonl":
        yield output.with_name(f"{request.name}_reward.py"), EXAMPLE_REWARD
        yield request.data, EXAMPLE_LINES


def _written_once(file: Path, text: str) -> bool:
    """Whether the file was not there, and is written."""
    if file.exists():
        return False
    file.write_text(text, encoding="utf-8")
    return True


def _head(request: StarterRequest, target: RunTarget, output: Path, proposal: Proposal) -> str:
    roles = "; ".join(f"{name}: {words}" for name, words in proposal.roles.items())
    commands = "".join(f"#   {command}\n" for command in next_commands(request, target, output))
    return (
        f"# {TASKS[request.task].capitalize()}, for {target.summary}.\n"
        f"# {roles}; a step is planned at {proposal.step_seconds:.3g} seconds.\n"
        f"# Every setting: megappo settings NAME. What is not said has defaults of recipes that worked.\n{commands}"
    )


def next_commands(request: StarterRequest, target: RunTarget, output: Path) -> Sequence[str]:
    """Commands for what comes next."""
    config = str(output)
    data = [] if request.task == "jsonl" else [command_line("data", "prepare", "gsm8k", str(request.data))]
    where = ("--machine", target.machine.name, "--gpus", str(target.ranks)) if target.machine.is_cuda else ()
    if target.scheduler and target.machine.is_cuda:
        start = sbatch_line(target.nodes, target.devices, output)
    else:
        each = "    # on each node; HOST is the first" if target.nodes > 1 else ""
        start = training_line(target.nodes, target.devices, ["train", config]) + each
    plan, dry_run = command_line("plan", config, *where), command_line("train", "--dry-run", config, *where)
    return (*data, plan, dry_run, start)
