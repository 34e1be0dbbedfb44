"""Rules between sections other than the algorithm and the rollout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megappo.config.schema import Config


def section_rules(config: Config, steps: int | None) -> Iterator[str]:
    """Check sections other than the algorithm against each other. `steps` is None if the number of steps is unknown."""
    if config.evaluation is not None and not config.data.evaluated:
        yield (
            "evaluation is given but there is no validation data; add data.validation or data.validation_sets, or "
            "set evaluation to null"
        )
    if config.critic is not None and steps is not None and config.critic.warmup_steps > steps:
        which = f"run.steps {steps}" if config.run.epochs is None else f"the {steps} steps of run.epochs"
        yield (
            f"critic.warmup_steps {config.critic.warmup_steps} is above {which}; set {steps} to train only the critic, "
            "or fewer to train the actor afterwards"
        )
    if config.checkpoint is None and not config.run.export_final_model:
        yield (
            "checkpoint is null and run.export_final_model is false, so the run would save no weights; set one of them"
        )
    reference = config.reference
    if reference is not None and config.model.init == "random" and config.actor.start_from is not None:
        yield (
            "reference would be initialized randomly by model.init, but the actor starts from actor.start_from; "
            "set model.path to a folder with weights and model.init to pretrained, or reference to null"
        )
    if config.checkpoint is None and config.run.max_hours is not None:
        yield (
            f"run.max_hours {config.run.max_hours:g} stops the run with a checkpoint, but checkpoint is null; remove "
            "one of the two settings"
        )
    directory = config.runtime.offload_directory
    if directory is not None and not directory.is_dir():
        yield (
            f"runtime.offload_directory '{directory}' is not a folder (from {Path.cwd()}); create it, or remove the "
            "setting to use the system's temporary folder"
        )
