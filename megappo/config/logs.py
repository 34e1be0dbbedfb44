"""Settings of what a run writes and shows (`logging`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megappo.config.base import NonNegativeInt, PositiveInt, Settings, StepNumbers, Text


class SaveExperienceSettings(Settings):
    """Samples as steps train on them, to be looked at, or trained on again (`rollout.load_from`)."""

    steps: StepNumbers = ()
    """Numbers of the steps; default: all."""
    samples: PositiveInt | None = None
    """Number of samples saved of each step, the first ones; default: all, which `rollout.load_from` needs."""


class WandbSettings(Settings):
    """How the run appears at Weights & Biases."""

    entity: Text | None = None
    """The user or team; default: that of the account."""
    group: Text | None = None
    """Name under which runs are shown together."""
    tags: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Words to find the run by."""
    mode: Literal["online", "offline"] | None = None
    """`offline` keeps everything in the run directory for `wandb sync`; default: `WANDB_MODE`, or online."""
    samples: bool = False
    """Send the samples of `logging.sample_texts` as tables: prompts and what the model wrote leave this machine."""


class LoggingSettings(Settings):
    tensorboard: bool = True
    """Write TensorBoard events to `<directory>/tensorboard`."""
    wandb_project: Text | None = None
    """Log to this Weights & Biases project too. A run that is continued goes on there under the same id."""
    wandb_run: WandbSettings = WandbSettings()
    """How the run appears there."""
    loggers: dict[Text, dict[str, Any]] = Field(default_factory=dict)
    """Loggers of your own: `{"package.module:name": {option: value}}`, called with their options as keyword
    arguments."""
    console: Literal["auto", "live", "plain", "quiet"] = "auto"
    """`live`: a progress view that is redrawn; `plain`: a line per step; `auto`: live on a terminal."""
    sample_texts: NonNegativeInt = 2
    """Samples per step written to `<directory>/samples.jsonl`."""
    save_experience: SaveExperienceSettings | None = None
    """Not null: write samples with everything that their updates use to `<directory>/experience`, as parquet."""
    profile_steps: StepNumbers = ()
    """Steps to trace: a torch trace of every rank and a page about all of them in `<directory>/profile`."""

    @property
    def shows_distributions(self) -> bool:
        """Whether any logger may want the distributions of a step's samples and tokens."""
        return self.tensorboard or self.wandb_project is not None or bool(self.loggers)
