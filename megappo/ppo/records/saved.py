"""Experience of steps on disk: written during training, and loaded for training without an engine.

`logging.save_experience` and `rollout.save_to` enable writing. `rollout.load_from` enables loading. The folder of a
step contains `step.json` and one file per rank (`experience_files`). The folder gets its final name when it is
complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from megappo.errors import writing
from megappo.models.context import token_text
from megappo.models.vocabulary import vocabulary_digest
from megappo.observe.saved_samples import MARKER, SavedStep, folder_of_step, saved_steps
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.records.experience_files import (
    SavedSamples,
    read_samples,
    require_parquet,
    sample_ids_of,
    write_samples,
)
from megappo.ppo.rollout.sampling import share_of_rank
from megappo.ppo.rollout.selection import joined
from megappo.ppo.rollout.step_samples import StepSamples
from megappo.runtime.ranks.objects import agreed, all_gather_objects, attempt
from megappo.types import Experience, Rollouts


class ExperienceRecord:
    """Writes the experience of steps. Every rank must call every method."""

    def __init__(self, parts: RunComponents) -> None:
        """Raises ConfigError if pyarrow is not installed."""
        self._settings, self._config, self._runtime = parts.config.saves_experience, parts.config, parts.runtime
        self._folder = parts.config.experience_folder
        self._reward_scores_B = torch.zeros(0)
        self._text_of = cache(partial(token_text, parts.tokenizer))
        self._vocabulary = None
        if self._settings is not None:
            require_parquet()
            self._vocabulary = vocabulary_digest(parts.tokenizer)

    def note(self, scores_B: Tensor) -> None:
        """Store the scores of the step's samples as returned by the reward."""
        self._reward_scores_B = scores_B

    def write(self, step: int, experience: Experience) -> str:
        """Write this rank's samples of a step that the settings save. Returns a message for the user on failure.

        Every rank returns the same message. A failed record must not end the run.
        """
        settings = self._settings
        if settings is None or (settings.steps and step not in settings.steps):
            return ""
        rollouts, most = self._config.rollout, self._config.rollout.batch_sequences
        ids = experience.scored.rollouts.sample_ids_B.tolist()
        rows = [b for b, sample_id in enumerate(ids) if settings.samples is None or sample_id < settings.samples]
        saved = SavedStep(
            folder=self._folder / f".{folder_of_step(self._folder, step).name}",
            step=step,
            run=str(self._config.run.path.resolve()),
            ranks=self._runtime.world_size,
            saved=min(most, settings.samples or most),
            prompts_per_step=rollouts.prompts_per_step,
            samples_per_prompt=rollouts.samples_per_prompt,
            temperature=rollouts.temperature,
            vocabulary=self._vocabulary,
            min_response_tokens=rollouts.min_response_tokens,
        )
        path, samples = saved.file(self._runtime.rank), SavedSamples(experience, self._reward_scores_B)
        problem = (
            self._everywhere(lambda: _clear(saved.folder), on_main=True)
            or self._everywhere(lambda: write_samples(path, samples, rows, self._text_of))
            or self._everywhere(lambda: _finish(saved, folder_of_step(self._folder, step)), on_main=True)
        )
        return f"the experience of step {step} is not saved: {problem}" if problem else ""

    def _everywhere(self, work: Callable[[], None], *, on_main: bool = False) -> str:
        """Return the error of the first rank on which the work failed, or ""."""
        problem = "" if on_main and not self._runtime.is_main else attempt(work, (OSError,))[1]
        return next(filter(None, all_gather_objects(problem)), "")


def _clear(folder: Path) -> None:
    """Create an empty folder. An unfinished folder of the same name is removed."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _finish(saved: SavedStep, folder: Path) -> None:
    """Write the marker and rename the folder. Called after all files are written."""
    content = {name: value for name, value in asdict(saved).items() if name != "folder"}
    with writing(saved.folder / MARKER):
        (saved.folder / MARKER).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(saved.folder, folder)


def read_some(saved: SavedStep, sample_ids: Collection[int]) -> SavedSamples:
    """Return the samples of a step with these ids in ascending order, from the files of any ranks.

    Raises ValueError if files are damaged or missing.
    """
    paths, chosen = saved.files, frozenset(sample_ids)
    matches = [(path, [b for b, i in enumerate(sample_ids_of(path)) if i in chosen]) for path in paths]
    parts = [(read_samples(path), rows) for path, rows in matches if rows] or [(read_samples(paths[0]), list[int]())]
    whole = joined_samples(parts)
    if len(whole.sample_ids) != len(sample_ids):
        raise ValueError(f"{saved.folder} lacks samples that are listed in {MARKER}; restore the saved folder")
    places = {sample_id: b for b, sample_id in enumerate(whole.sample_ids)}
    return joined_samples([(whole, [places[i] for i in sorted(sample_ids)])])


def joined_samples(parts: Sequence[tuple[SavedSamples, Sequence[int]]]) -> SavedSamples:
    """Return rows of several sets of samples, concatenated."""
    experience = joined([(samples.experience, rows) for samples, rows in parts])
    return SavedSamples(experience, torch.cat([samples.given_B[list(rows)] for samples, rows in parts]))


def check_tokens(samples: SavedSamples, vocabulary: int) -> SavedSamples:
    """Return the samples. Raises ValueError if the models have no embedding for a token id."""
    largest = max((int(tokens.max()) for tokens in samples.experience.scored.rollouts.sequences), default=0)
    if largest >= vocabulary:
        raise ValueError(
            f"saved samples contain token {largest}, but the models have {vocabulary} tokens; load samples that "
            "were saved with this tokenizer"
        )
    return samples


class LoadedSteps(StepSamples):
    """Provides steps with the samples that another run saved.

    With the same number of ranks, each rank reads its own file. Otherwise each rank reads a share of the prompts.
    `more` is not implemented, because a saved step contains the groups selected by dynamic sampling.
    """

    def __init__(self, parts: RunComponents, folder: Path) -> None:
        super().__init__(parts)
        self._folder = folder
        require_parquet()
        self._steps = agreed(lambda: saved_steps(folder))
        self.given_B = torch.zeros(0)
        """Scores of the step's samples, before `reward.scale` and similar settings."""

    def of_step(self, step: int, *, weights_changed: bool) -> Rollouts:
        """Return this rank's samples of a step. Raises ValueError on every rank if the samples cannot be read."""
        self._parts.stop.check()
        samples = agreed(lambda: check_tokens(self._read(step), self._parts.vocabulary))
        self.given_B = samples.given_B
        return samples.experience.scored.rollouts

    def _read(self, step: int) -> SavedSamples:
        if step not in self._steps:
            raise ValueError(f"{self._folder} has no step {step}; end the run before that step by run.steps")
        saved, runtime = self._steps[step], self._parts.runtime
        if saved.ranks == runtime.world_size:
            return read_samples(saved.file(runtime.rank))
        first, stop = share_of_rank(saved.prompts_per_step, runtime)
        return read_some(saved, range(first * saved.samples_per_prompt, stop * saved.samples_per_prompt))
