"""Rules for experience that is saved and loaded, and what a folder of it says of itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from megappo.config.base import LARGEST_WORLD
from megappo.errors import first_of, reason
from megappo.observe.plain_files import plain_text

if TYPE_CHECKING:
    from megappo.config.schema import Config

MARKER = "step.json"
"""File in the folder of a step that is written last: the folder is complete where it exists."""
_MOST = 5


@dataclass(frozen=True, config=ConfigDict(strict=True))
class SavedStep:
    """A step whose experience is saved: what its marker says."""

    folder: Path
    step: int
    run: str
    """Directory of the run that saved it."""
    ranks: Annotated[int, Field(ge=1, le=LARGEST_WORLD)]
    """Ranks of that run, each of which wrote a file."""
    saved: Annotated[int, Field(ge=1)]
    """Number of samples in the folder."""
    prompts_per_step: Annotated[int, Field(ge=1)]
    samples_per_prompt: Annotated[int, Field(ge=1)]
    temperature: float
    vocabulary: str | None = None
    """`vocabulary_digest` of that run's tokenizer; None in folders of earlier versions."""
    min_response_tokens: int | None = None
    """`rollout.min_response_tokens` of that run; None in folders of earlier versions."""

    @property
    def is_whole(self) -> bool:
        """Whether all samples of the step were saved."""
        return self.saved == self.prompts_per_step * self.samples_per_prompt

    def file(self, rank: int) -> Path:
        """The file of a rank's samples."""
        return self.folder / f"rank-{rank:05d}.parquet"


def folder_of_step(folder: Path, step: int) -> Path:
    """Where the experience of a step is saved, or its samples in a record of arrivals."""
    return folder / f"step-{step:06d}"


def saved_steps(folder: Path) -> dict[int, SavedStep]:
    """The steps in a folder of experience, in their order. Raises ValueError where one cannot be read."""
    found = {}
    for marker in sorted(folder.glob(f"step-*/{MARKER}")):
        try:
            step = SavedStep(folder=marker.parent, **json.loads(plain_text(marker)))
        except (OSError, ValueError, TypeError) as error:
            why = ", ".join(map(_problem, error.errors())) if isinstance(error, ValidationError) else reason(error)
            raise ValueError(f"{marker} cannot be read ({why}); bring the folder as it was saved") from error
        found[step.step] = step
    return found


def folder_of_run(directory: Path, config: Config | None) -> Path:
    """Where a run saved experience, by its configuration if that is known; the directory may have been moved."""
    elsewhere = None if config is None else config.rollout.save_to
    return directory / "experience" if elsewhere is None else Path(elsewhere)


def _problem(found: ErrorDetails) -> str:
    """A problem that pydantic found, in its words."""
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"


def experience_rules(config: Config, steps: int | None) -> Iterator[str]:
    """Rules on loaded experience: it exists, and its steps are like the run's. `steps` of the run, None where not
    known."""
    given, critic = config.rollout.load_from, config.critic
    if critic is not None and critic.pretraining is not None and given is None:
        yield (
            "critic.pretraining is given, but nothing is named to train on; set rollout.load_from to the folder "
            "`experience` of a run with logging.save_experience"
        )
    if given is None:
        return
    yield from _without_engine(config)
    folder = Path(given)
    try:
        there = saved_steps(folder)
    except ValueError as error:
        yield f"rollout.load_from: {error}"
        return
    if not there:
        yield (
            f"rollout.load_from '{folder}' holds no saved step (from {Path.cwd()}); name the folder `experience` of a "
            "run with logging.save_experience, or what its rollout.save_to named"
        )
        return
    other = next((s.temperature for s in there.values() if s.temperature != config.rollout.temperature), None)
    if other is not None:
        yield (
            f"rollout.temperature is {config.rollout.temperature:g}, and log-probabilities in rollout.load_from are of "
            f"{other:g}; set it to that"
        )
    least = {step.min_response_tokens for step in there.values()} - {None, config.rollout.min_response_tokens}
    if least:
        yield (
            f"rollout.min_response_tokens is {config.rollout.min_response_tokens}, and log-probabilities in "
            f"rollout.load_from are of {min(map(str, least))}; set it to that"
        )
    yield from _pool_rules(config, there) if config.pretrains_critic else _step_rules(config, there, steps)


def _without_engine(config: Config) -> Iterator[str]:
    """Rules against settings that need an engine or drawn prompts."""
    rollout, data = config.rollout, config.data
    if config.evaluation is not None:
        yield "rollout.load_from starts no engine, which evaluation would ask; set evaluation to null"
    if data.curriculum is not None:
        yield "rollout.load_from draws no prompts, among which data.curriculum chooses; set data.curriculum to null"
    for key in ("record_arrivals", "replay_arrivals"):
        if getattr(rollout, key):
            yield f"rollout.load_from and rollout.{key} are both given; remove one of them"
    assert rollout.load_from is not None
    if config.saves_experience is not None and config.experience_folder.resolve() == Path(rollout.load_from).resolve():
        yield f"experience would be saved to {rollout.load_from}, which rollout.load_from reads; name another folder"


def _step_rules(config: Config, there: Mapping[int, SavedStep], steps: int | None) -> Iterator[str]:
    """Rules on training from saved steps: each step of the run was saved under its number, with all its samples."""
    rollout, folder = config.rollout, config.rollout.load_from
    sizes = rollout.sizes
    other = next((s for s in there.values() if (s.prompts_per_step, s.samples_per_prompt) != sizes), None)
    if other is not None:
        yield (
            f"rollout.load_from '{folder}' has steps of {other.prompts_per_step} prompts x {other.samples_per_prompt} "
            f"samples, the run of {sizes[0]} x {sizes[1]}; set rollout.prompts_per_step and samples_per_prompt to those"
        )
    wanted = range(1, (steps or 0) + 1)
    missing = [step for step in wanted if step not in there]
    if missing:
        yield (
            f"rollout.load_from '{folder}' has no step {first_of(missing, _MOST)}; set run.steps to "
            f"{missing[0] - 1 or 1}, or save all steps there (logging.save_experience without steps)"
        )
    cut = [step for step in wanted if step in there and not there[step].is_whole]
    if cut:
        some = there[cut[0]]
        yield (
            f"rollout.load_from '{folder}' has {some.saved} of the {some.prompts_per_step * some.samples_per_prompt} "
            f"samples of step {cut[0]}; save all (logging.save_experience without samples)"
        )


def held_out(config: Config, saved: int) -> int:
    """Number of the `saved` samples that value pretraining holds out."""
    assert config.critic is not None and config.critic.pretraining is not None
    given = config.critic.pretraining.held_out_samples
    return given or max(1, min(saved // 10, config.rollout.batch_sequences))


def _pool_rules(config: Config, there: Mapping[int, SavedStep]) -> Iterator[str]:
    """Rule on value pretraining: the samples that are not held out fill a step."""
    saved, wanted = sum(step.saved for step in there.values()), config.rollout.batch_sequences
    kept = held_out(config, saved)
    if saved - kept < wanted:
        yield (
            f"rollout.load_from '{config.rollout.load_from}' has {saved} samples, of which {kept} are held out, fewer "
            f"than the {wanted} of a step; lower rollout.prompts_per_step or critic.pretraining.held_out_samples, or "
            "save more"
        )
