"""Searches the layout of a new configuration, writes the file and what it names, and says what comes next."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megappo.config import ConfigError, load_config
from megappo.plan.planner import planning
from megappo.plan.search import Proposal, best_layouts, remedy
from megappo.starter.lines import Line, changed, rendered
from megappo.starter.place import Place
from megappo.starter.tasks import EXAMPLE_LINES, EXAMPLE_REWARD, TASKS, Asked, lines_of, models

_LAYOUT = "by the search of `megappo plan --search`"


@dataclass(frozen=True)
class Written:
    """What was written."""

    files: tuple[Path, ...]
    proposal: Proposal
    notes: tuple[str, ...]
    """From where models were read that are not on this machine."""


def write(asked: Asked, place: Place, output: Path, beside: Path) -> Written:
    """Write the configuration of a task, and the example files that it names where they are not there.

    `beside`: a folder with the config.json of models that are not on this machine. Raises ConfigError where no model
    fits the place, and for a model that cannot be read.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = output.with_name(f".{output.stem}.{os.getpid()}.yaml")
    try:
        for model in models(asked, place):
            lines = lines_of(asked, place, model)
            draft.write_text(rendered(lines), encoding="utf-8")
            found = planning(load_config(draft), None, place.ranks, beside)
            layouts = best_layouts(found.config, found.models, place.machine, place.ranks, count=1)
            if layouts:
                chosen = changed(lines, map(_line, layouts[0].overrides))
                draft.write_text(_head(asked, place, output, layouts[0]) + rendered(chosen), encoding="utf-8")
                load_config(draft)
                files = [file for file, text in _examples(asked, output) if _written_once(file, text)]
                draft.replace(output)
                return Written((output, *files), layouts[0], found.notes)
        raise ConfigError(remedy(found.config, found.models, place.machine, place.ranks)[0])
    finally:
        draft.unlink(missing_ok=True)


def _line(override: str) -> Line:
    key, _, value = override.partition("=")
    return Line(key, yaml.safe_load(value), _LAYOUT)


def _examples(asked: Asked, output: Path) -> Iterator[tuple[Path, str]]:
    if asked.task == "jsonl":
        yield output.with_name(f"{asked.name}_reward.py"), EXAMPLE_REWARD
        yield asked.data, EXAMPLE_LINES


def _written_once(file: Path, text: str) -> bool:
    """Whether the file was not there, and is written."""
    if file.exists():
        return False
    file.write_text(text, encoding="utf-8")
    return True


def _head(asked: Asked, place: Place, output: Path, proposal: Proposal) -> str:
    roles = "; ".join(f"{name}: {words}" for name, words in proposal.roles.items())
    commands = "".join(f"#   {command}\n" for command in next_commands(asked, place, output))
    return (
        f"# {TASKS[asked.task].capitalize()}, for {place.words}.\n"
        f"# {roles}; a step is planned at {proposal.step_seconds:.3g} seconds.\n"
        f"# Every setting: megappo settings NAME. What is not said has defaults of recipes that worked.\n{commands}"
    )


def next_commands(asked: Asked, place: Place, output: Path) -> Sequence[str]:
    """Commands for what comes next."""
    data = [] if asked.task == "jsonl" else [f"megappo data prepare gsm8k {asked.data}"]
    where = f" --machine {place.machine.name} --gpus {place.ranks}" if place.machine.is_cuda else ""
    if place.scheduler and place.machine.is_cuda:
        start = f"sbatch --nodes {place.nodes} --gpus-per-node {place.devices} launch/slurm/ppo.sbatch {output}"
    elif place.nodes > 1:
        start = f"launch/torchrun.sh {place.devices} train {output}    # on every node; see launch/README.md"
    else:
        start = f"launch/torchrun.sh {place.ranks} train {output}"
    return (*data, f"megappo plan {output}{where}", f"megappo train --dry-run {output}{where}", start)
