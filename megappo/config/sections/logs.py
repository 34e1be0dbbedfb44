"""Settings of files, loggers and the console (`logging`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megappo.config.base import NonNegativeInt, PositiveInt, Settings, StepNumbers, Text


class SaveExperienceSettings(Settings):
    """Saved samples of training steps, for inspection or for training again (`rollout.load_from`)."""

    steps: StepNumbers = ()
    """Numbers of the saved steps. Default: all steps."""
    samples: PositiveInt | None = None
    """Number of saved samples of each step, counted from the first. Default: all (needed by `rollout.load_from`)."""


class WandbSettings(Settings):
    """Display of the run in Weights & Biases."""

    entity: Text | None = None
    """User or team. Default: the entity of the account."""
    group: Text | None = None
    """Name of the group of runs."""
    tags: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Search tags of the run."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes everything to the run directory for `wandb sync`. Default: `WANDB_MODE`, or online."""
    samples: bool = False
    """Whether to send the samples of `logging.sample_texts` as tables. Prompts and responses leave this machine."""


class LoggingSettings(Settings):
    tensorboard: bool = True
    """Whether to write TensorBoard events to `<directory>/tensorboard`."""
    wandb_project: Text | None = None
    """Weights & Biases project of the run. Null: no logging there. A resumed run continues with the same id."""
    wandb_run: WandbSettings = WandbSettings()
    """Group, tags and mode of the run in Weights & Biases."""
    loggers: dict[Text, dict[str, Any]] = Field(default_factory=dict)
    """Custom loggers: `{"file.py:name": {option: value}}`, or `package.module:name` as the key. The options
    are keyword arguments."""
    console: Literal["auto", "live", "plain", "quiet"] = "auto"
    """Console output. `live`: a redrawn progress view. `plain`: a line per step. `auto`: live on a terminal."""
    sample_texts: NonNegativeInt = 2
    """Number of samples per step in `<directory>/samples.jsonl`."""
    save_experience: SaveExperienceSettings | None = None
    """Not null: save samples with all data of their updates to `<directory>/experience` as parquet."""
    profile_steps: StepNumbers = ()
    """Steps to profile. `<directory>/profile` contains a torch trace of every rank and a summary page."""

    @property
    def shows_distributions(self) -> bool:
        """Whether a logger can show distributions of the samples and tokens of a step."""
        return self.tensorboard or self.wandb_project is not None or bool(self.loggers)
