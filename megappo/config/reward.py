"""Settings of what samples are worth."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megappo.config.base import Fraction, PathText, PositiveFloat, PositiveInt, Processes, Seconds, Settings, Text

_TAKEN_NAMES = ("mean", "std", "min", "max", "failures", "timeouts", "overlong")
"""Of metrics `reward/...` that there are always."""


class OverlongSettings(Settings):
    buffer_tokens: PositiveInt
    """The last so many tokens before the limit are punished, more from one to the next."""
    penalty: PositiveFloat = 1.0
    """What an answer at the limit loses."""


class RewardTermSettings(Settings):
    function: Text
    """A rule, or `package.module:function`."""
    weight: float = Field(default=1.0, ge=-1e9, le=1e9)
    """What its score is multiplied by in the sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    batch: bool = False
    """The Python function takes lists and returns a list, one score per sample."""


class RewardSettings(Settings):
    function: Text | None = None
    """`exact`, `number`, `gsm8k`, `math_verify`, `reasoning_gym`, `model`, `package.module:function`, or `environment`:
    nothing but what `rollout.environment` gives, which other functions' scores are added to. Default: `functions`.
    """
    functions: dict[str, RewardTermSettings] = Field(default_factory=dict)
    """Several functions in its place, each by a name, under which its mean is a metric (`reward/NAME`): a mapping of
    names to `{function, weight, options, batch}`. The reward is their weighted sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    batch: bool = False
    """The Python function takes lists and returns a list, one score per sample."""
    workers: Processes = 1
    """Worker processes per rank."""
    timeout_seconds: Seconds = 10.0
    """Time limit per sample; a worker that exceeds it is killed and replaced."""
    worker_memory_gigabytes: PositiveFloat = 8.0
    """A worker that holds more (GB, 1e9 bytes) after its samples is replaced: a function that leaks costs no run."""
    failure_score: float = Field(default=0.0, ge=-1e9, le=1e9)
    """Score of a sample whose reward failed or ran out of time."""
    max_failure_fraction: Fraction = 0.5
    """The run stops when more than this fraction of a step's rewards failed."""
    overlong: OverlongSettings | None = None
    """Not null: answers near the length limit of `rollout.max_response_tokens` get less (DAPO)."""
    model_path: PathText | None = None
    """Folder of the reward model (AutoModelForSequenceClassification) for `function: model`."""

    def model_dtype(self, *, on_cuda: bool) -> Literal["float32", "bfloat16"]:
        """Type in which a reward model computes."""
        return "bfloat16" if on_cuda else "float32"

    @property
    def terms(self) -> dict[str, tuple[float, RewardSettings]]:
        """Weight, and settings that name it alone, of each function, by its name: "" where there is only one."""
        if self.function is not None:
            return {"": (1.0, self)}
        found = {}
        for name, term in self.functions.items():
            own = {"function": term.function, "options": term.options, "batch": term.batch, "functions": {}}
            workers = 1 if term.batch else self.workers
            found[name] = term.weight, self.model_copy(update={**own, "workers": workers})
        return found

    @property
    def words(self) -> str:
        """The functions, for people."""
        return ", ".join(str(settings.function) for _, settings in self.terms.values())

    @model_validator(mode="after")
    def _has_functions(self) -> RewardSettings:
        if (self.function is None) == (not self.functions):
            given = "neither" if self.function is None else "both"
            raise ValueError(f"{given} of function and functions are given; give one of them")
        if self.functions and (self.options or self.batch):
            raise ValueError("options and batch are those of a single function; write them into functions")
        for name, term in self.functions.items():
            if not name.isidentifier() or name in _TAKEN_NAMES:
                raise ValueError(
                    f"functions has '{name}', which is no name of a metric of its own; use letters, digits and _"
                )
            if term.function in ("model", "environment"):
                raise ValueError(f"functions has '{term.function}', which stands alone; set function to it")
        return self

    @model_validator(mode="after")
    def _model_has_path(self) -> RewardSettings:
        if (self.function == "model") != (self.model_path is not None):
            raise ValueError("model_path belongs to function: model; set both or neither")
        return self
