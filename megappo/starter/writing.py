"""Searches the layout of a new configuration, writes the configuration and its example files, and lists the next
commands."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megappo.config import ConfigError, load_config
from megappo.config.start_lines import command_line, sbatch_line, training_line
from megappo.plan.planner import Planning, make_plan, planning
from megappo.plan.search import Proposal, best_layouts, remedy
from megappo.starter.commented_yaml import Setting, overridden, to_yaml
from megappo.starter.target import RunTarget
from megappo.starter.tasks import (
    EXAMPLE_LINES,
    EXAMPLE_REWARD,
    TASKS,
    StarterRequest,
    checkpoint_interval,
    models,
    settings_of,
)

_LAYOUT = "by the search of `megappo plan --search`"


@dataclass(frozen=True)
class StarterFiles:
    """Files of a new configuration, and notes."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]
    """Sources of models that are missing on this machine."""


def write(request: StarterRequest, target: RunTarget, output: Path, model_configs: Path) -> StarterFiles:
    """Write the configuration of a task, and its example files if they do not exist.

    Args:
        request: options of `megappo init`.
        target: devices of the run.
        output: configuration file.
        model_configs: folder with the config.json of models that are missing on this machine.

    Raises ConfigError if no model fits the target or a model cannot be read.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = output.with_name(f".{output.stem}.{os.getpid()}.yaml")
    try:
        candidates = models(request, target)
        for model in candidates:
            settings = settings_of(request, target, model)
            draft.write_text(to_yaml(settings), encoding="utf-8")
            proposed = planning(load_config(draft), None, target.ranks, model_configs)
            layouts = best_layouts(proposed.config, proposed.models, target.machine, target.ranks, count=1)
            if layouts:
                chosen = overridden(settings, map(_setting, layouts[0].overrides))
                draft.write_text(to_yaml(chosen), encoding="utf-8")
                plan = make_plan(load_config(draft), proposed.models, target.machine, target.ranks)
                chosen = overridden(chosen, [checkpoint_interval(plan.stopping.every_steps)])
                draft.write_text(_head(request, target, output, layouts[0]) + to_yaml(chosen), encoding="utf-8")
                load_config(draft)
                files = [file for file, text in _examples(request, output) if _written_once(file, text)]
                draft.replace(output)
                return StarterFiles((output, *files), proposed.notes)
        raise ConfigError(_misfit(candidates, proposed, target))
    finally:
        draft.unlink(missing_ok=True)


def _misfit(candidates: Sequence[str], last: Planning, target: RunTarget) -> str:
    """Return one sentence about models that do not fit. `last` is the last and smallest of the models."""
    sentence, proposal = remedy(last.config, last.models, target.machine, target.ranks)
    if proposal is None:
        sentence = f"no layout on {target.ranks} x {target.machine.name} fits, nor on four times the number"
    verb = "does" if len(candidates) == 1 else "do"
    return (
        f"{' and '.join(candidates)} {verb} not fit on {target.summary}: {sentence}; name a smaller --model, or a "
        "larger machine, for example --machine h100 --gpus 8"
    )


def _setting(override: str) -> Setting:
    key, _, value = override.partition("=")
    return Setting(key, yaml.safe_load(value), _LAYOUT)


def _examples(request: StarterRequest, output: Path) -> Iterator[tuple[Path, str]]:
    if request.task == "jsonl":
        yield output.with_name(f"{request.name}_reward.py"), EXAMPLE_REWARD
        yield request.data, EXAMPLE_LINES


def _written_once(file: Path, text: str) -> bool:
    """Write a file if it does not exist. Return whether it was written."""
    if file.exists():
        return False
    file.write_text(text, encoding="utf-8")
    return True


def _head(request: StarterRequest, target: RunTarget, output: Path, proposal: Proposal) -> str:
    roles = "; ".join(f"{name}: {description}" for name, description in proposal.roles.items())
    commands = "".join(f"#   {command}\n" for command in next_commands(request, target, output))
    return (
        f"# {TASKS[request.task].capitalize()}, for {target.summary}.\n"
        f"# {roles}; a step is planned at {proposal.step_seconds:.3g} seconds.\n"
        f"# Every setting: megappo settings NAME. Omitted settings have defaults of tested recipes.\n{commands}"
    )


def next_commands(request: StarterRequest, target: RunTarget, output: Path) -> Sequence[str]:
    """Return the commands for the next steps of the user."""
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
