"""Removal of records of an earlier attempt for steps that a resumed run repeats.

Readers could not distinguish these samples from the training samples of the run. Records are removed even if the
resumed run does not record.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megappo.config import Config
from megappo.config.rules.arrivals import INDEX, read_index
from megappo.files.plain_files import synced
from megappo.observe.saved_samples import folder_of_step, saved_steps
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.rollout.arrivals import FOLDER
from megappo.runtime.ranks.objects import agreed


def forget_after(step: int, parts: RunComponents) -> None:
    """Remove saved experience and recorded arrivals of steps after `step`. A collective of the world.

    Folders from which the run reads samples are not changed. If no step is left to train, nothing is removed. Raises
    ValueError on all ranks if a record cannot be read, or if the folder for new experience contains steps of a
    different run.
    """
    config = parts.config

    def forget() -> None:
        if not _is_same(config.experience_folder, config.rollout.load_from):
            forget_experience(step, config)
        if not _is_same(config.run.path / FOLDER, config.rollout.replay_arrivals):
            forget_arrivals(config.run.path / FOLDER, step)

    if step < parts.derived.steps:
        agreed(lambda: forget() if parts.runtime.is_main else None)


def _is_same(folder: Path, other: str | None) -> bool:
    return other is not None and folder.resolve() == Path(other).resolve()


def forget_experience(step: int, config: Config) -> None:
    """Remove saved experience of later steps. Without `save_experience`, the folder is in the run directory."""
    folder, run = config.experience_folder, str(config.run.path.resolve())
    for saved in saved_steps(folder).values():
        if saved.run != run and config.saves_experience is not None:
            raise ValueError(f"{folder} has experience of {saved.run}; set a different folder, or remove this folder")
        if saved.step > step:
            shutil.rmtree(saved.folder)


def forget_arrivals(folder: Path, step: int) -> None:
    """Remove recorded arrivals of later steps. Lines are removed before their files."""
    index = folder / INDEX
    if not index.exists():
        return
    index_lines = read_index(folder)
    earlier_lines = [line for number, line in index_lines.items() if number <= step]
    if len(earlier_lines) == len(index_lines):
        return
    partial = index.with_name(f"{INDEX}.partial")
    with synced(partial) as file:
        file.writelines(json.dumps(line).encode() + b"\n" for line in earlier_lines)
    partial.replace(index)
    for number in index_lines:
        if number > step and folder_of_step(folder, number).exists():
            shutil.rmtree(folder_of_step(folder, number))
