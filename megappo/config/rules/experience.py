"""Rules for saved and loaded experience."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.errors import ConfigError, first_of
from megappo.models.vocabulary import vocabulary_digest
from megappo.observe.saved_samples import SavedStep, saved_steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megappo.config.schema import Config

_MOST = 5


def folder_of_run(directory: Path, config: Config | None) -> Path:
    """Return the folder in which a run saved experience.

    A known configuration supplies `rollout.save_to`. Otherwise the folder is in the run directory, which may have been
    moved.
    """
    elsewhere = None if config is None else config.rollout.save_to
    return directory / "experience" if elsewhere is None else Path(elsewhere)


def experience_rules(config: Config, steps: int | None) -> Iterator[str]:
    """Check that the folder of loaded experience exists and that its steps match the run.

    Args:
        config: settings of the run.
        steps: number of steps of the run; None: unknown.
    """
    load_from, critic = config.rollout.load_from, config.critic
    if critic is not None and critic.pretraining is not None and load_from is None:
        yield (
            "critic.pretraining is given, but there is no data to train on; set rollout.load_from to the folder "
            "`experience` of a run with logging.save_experience"
        )
    if load_from is None:
        return
    yield from _without_engine(config)
    folder = Path(load_from)
    try:
        by_step = saved_steps(folder)
    except ValueError as error:
        yield f"rollout.load_from: {error}"
        return
    if not by_step:
        yield (
            f"rollout.load_from '{folder}' holds no saved step (from {Path.cwd()}); use the folder `experience` of a "
            "run with logging.save_experience, or the folder that its rollout.save_to named"
        )
        return
    other = next((s.temperature for s in by_step.values() if s.temperature != config.rollout.temperature), None)
    if other is not None:
        yield (
            f"rollout.temperature is {config.rollout.temperature:g}, but the log-probabilities in rollout.load_from "
            f"were computed at {other:g}; set rollout.temperature to the saved value"
        )
    least = {step.min_response_tokens for step in by_step.values()} - {None, config.rollout.min_response_tokens}
    if least:
        yield (
            f"rollout.min_response_tokens is {config.rollout.min_response_tokens}, but the log-probabilities in "
            f"rollout.load_from were computed with {min(map(str, least))}; set it to the saved value"
        )
    yield from _pool_rules(config, by_step) if config.pretrains_critic else _step_rules(config, by_step, steps)


def _without_engine(config: Config) -> Iterator[str]:
    """Check that no setting needs an engine or sampled prompts."""
    rollout, data = config.rollout, config.data
    if config.evaluation is not None:
        yield "rollout.load_from starts no engine, but evaluation needs one; set evaluation to null"
    if data.curriculum is not None:
        yield "rollout.load_from draws no prompts, but data.curriculum selects prompts; set data.curriculum to null"
    for key in ("record_arrivals", "replay_arrivals"):
        if getattr(rollout, key):
            yield f"rollout.load_from and rollout.{key} are both given; remove one of them"
    assert rollout.load_from is not None
    if config.saves_experience is not None and config.experience_folder.resolve() == Path(rollout.load_from).resolve():
        yield f"experience would be saved to {rollout.load_from}, which rollout.load_from reads; name another folder"


def _step_rules(config: Config, by_step: Mapping[int, SavedStep], steps: int | None) -> Iterator[str]:
    """Check that each step of the run was saved under the same number with all its samples."""
    rollout, folder = config.rollout, config.rollout.load_from
    sizes = rollout.sizes
    other = next((s for s in by_step.values() if (s.prompts_per_step, s.samples_per_prompt) != sizes), None)
    if other is not None:
        yield (
            f"rollout.load_from '{folder}' has steps of {other.prompts_per_step} prompts x {other.samples_per_prompt} "
            f"samples, but the run has {sizes[0]} x {sizes[1]}; set rollout.prompts_per_step and samples_per_prompt to "
            "the saved sizes"
        )
    required = range(1, (steps or 0) + 1)
    missing = [step for step in required if step not in by_step]
    if missing:
        yield (
            f"rollout.load_from '{folder}' has no step {first_of(missing, _MOST)}; set run.steps to "
            f"{missing[0] - 1 or 1}, or save all steps (logging.save_experience without steps)"
        )
    cut = [step for step in required if step in by_step and not by_step[step].is_whole]
    if cut:
        some = by_step[cut[0]]
        yield (
            f"rollout.load_from '{folder}' has {some.saved} of the {some.prompts_per_step * some.samples_per_prompt} "
            f"samples of step {cut[0]}; save all samples (logging.save_experience without samples)"
        )


def held_out(config: Config, saved: int) -> int:
    """Return the number of held-out samples among the `saved` samples of value pretraining."""
    assert config.critic is not None and config.critic.pretraining is not None
    configured = config.critic.pretraining.held_out_samples
    return configured or max(1, min(saved // 10, config.rollout.batch_sequences))


def _pool_rules(config: Config, by_step: Mapping[int, SavedStep]) -> Iterator[str]:
    """Check that the samples for value pretraining fill a step after the held-out samples are removed."""
    saved, required = sum(step.saved for step in by_step.values()), config.rollout.batch_sequences
    reserved = held_out(config, saved)
    if saved - reserved < required:
        yield (
            f"rollout.load_from '{config.rollout.load_from}' has {saved} samples, of which {reserved} are held out; "
            f"fewer than the {required} samples of a step remain; lower rollout.prompts_per_step or "
            "critic.pretraining.held_out_samples, or save more samples"
        )


def check_saved_tokens(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Check that the samples in `folder` (`rollout.load_from`) were saved with the run's vocabulary. Raises ConfigError
    otherwise."""
    digests = {step.vocabulary for step in saved_steps(folder).values()} - {None}
    if digests and digests != {vocabulary_digest(tokenizer)}:
        raise ConfigError(
            f"rollout.load_from '{folder}' has samples of a run with another tokenizer, in which ids stand for other "
            "tokens; set model.tokenizer to the tokenizer of that run"
        )
