"""Settings of training prompts, validation prompts and prompt processing."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from megappo.config.base import PathText, PositiveInt, Settings, Text, rule_of_one
from megappo.errors import expanded, show
from megappo.models.chat_template import is_template

OLD_PYTHON_PREFIX = "python:"
"""Prefix of import paths in older settings, when other plug-ins had no prefix. The prefix is still accepted."""
HUB_PREFIX = "datasets:"
"""Prefix of sources that the Hugging Face library `datasets` reads."""
_LONGEST_NAME_CHARACTERS = 60
_LARGEST_REWARD = 1e9
_Reward = Annotated[float, Field(ge=-_LARGEST_REWARD, le=_LARGEST_REWARD)]


_RESERVED_VARIABLES = {
    "messages": "the data",
    "tools": "rollout.environment, if it has tools",
    "add_generation_prompt": "the rendering of a prompt",
    "strftime_now": "data.template_time",
}
"""Variables of chat templates that a run sets, and the source of each variable."""


class DataSourceSettings(Settings):
    source: PathText
    """Source of prompts: `FILE.jsonl`, `FILE.parquet`, a file pattern such as `data/part-*.parquet`, `datasets:NAME`
    or `datasets:FOLDER` with an optional suffix `:SPLIT` or `:CONFIG:SPLIT`, `reasoning_gym:TASK`, or
    `file.py:function` or `package.module:function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reasoning-gym task or the Python function."""
    prompt_key: Text = "prompt"
    """Field with the prompt in a line, row or record. The prompt is a string or a list of chat messages."""
    answer_key: Text = "answer"
    """Field with the reference answer for the reward. For parquet files in verl's schema, the default is
    `reward_model.ground_truth`, unless a column has the name in this setting."""
    limit: PositiveInt | None = None
    """Maximum number of records, counted from the first record."""

    @field_validator("source")
    @classmethod
    def _names_a_data_set(cls, source: str) -> str:
        source = source.removeprefix(OLD_PYTHON_PREFIX)
        if source.startswith(HUB_PREFIX):  # the rest can be a folder
            source = HUB_PREFIX + expanded(source.removeprefix(HUB_PREFIX))
        parts = source.split(":")[1:]
        if source.startswith(HUB_PREFIX) and not (len(parts) <= 3 and all(parts)):
            raise ValueError(
                f"{show(source)} names no data set; write datasets:NAME, datasets:NAME:SPLIT or "
                "datasets:NAME:CONFIG:SPLIT"
            )
        return source


class MixedSourceSettings(DataSourceSettings):
    weight: float = Field(default=1.0, ge=1e-6, le=1e6)
    """Relative weight of the source. Its share of the prompts is its weight divided by the sum of all weights."""


class ValidationSetSettings(DataSourceSettings):
    samples: int = Field(default=1, gt=0, le=1024)
    """Number of answers to each prompt."""
    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    """Sampling temperature. 0: greedy decoding."""
    pass_at: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = ()
    """Values of k for `pass@k`, the unbiased estimate of the probability that one of k answers is correct."""
    right_above: _Reward = 0.5
    """Reward threshold. Answers with a higher reward are correct."""

    def broken_rules(self) -> Iterator[str]:
        above = max(self.pass_at, default=0)
        if above > self.samples:
            yield (
                f"pass_at has {above}, which needs at least {above} samples, but samples is {self.samples}; "
                "raise samples, or lower pass_at"
            )
        twice = [k for k, count in Counter(self.pass_at).items() if count > 1]
        if twice:
            yield f"pass_at has {twice[0]} more than once; remove the duplicate"
        if self.samples > 1 and self.temperature == 0.0:
            yield (
                f"samples {self.samples} at temperature 0 are identical answers; set temperature above 0, or samples "
                "to 1"
            )


class CurriculumSettings(Settings):
    right_above: _Reward
    """Threshold of a prompt's mean reward in a step. Prompts with a higher mean reward rest."""
    rest_epochs: Annotated[int, Field(gt=0, le=10_000)] = 1
    """Number of passes over its source that skip a resting prompt, starting with the next pass."""
    most_resting: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Maximum share of a source that a pass skips. If more prompts would rest, the pass includes the prompts with the
    earliest end of rest. Among equal prompts, the pass includes the last prompts of the source."""


class DataSettings(Settings):
    train: DataSourceSettings | None = None
    """Prompts for training. Set either this field or `mixture`."""
    mixture: dict[str, MixedSourceSettings] | None = None
    """Several named sources instead of `train`: a mapping from names to the settings of a source and its `weight` (1).
    The metrics of a source have the prefix `source/NAME/`."""
    curriculum: CurriculumSettings | None = None
    """Not null: exclude prompts with good answers from some passes over their source."""
    validation: DataSourceSettings | None = None
    """Prompts of the periodic evaluation and of `megappo eval`. Each prompt gets one greedy answer."""
    validation_sets: dict[str, ValidationSetSettings] | None = None
    """Additional named validation sets: a mapping from names to the settings of a source with `samples` (1),
    `temperature` (0: greedy), `pass_at` (such as [1, 4]) and `right_above` (0.5). Their metrics have the prefix
    `eval/NAME/`."""
    apply_chat_template: bool = True
    """Whether to render prompts with the chat template of the tokenizer. If false, prompts are plain text."""
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """Template instead of the tokenizer's template: a text, or a file next to the configuration or in the working
    directory. The text of the file replaces the path in the settings. Exported models contain the template."""
    chat_template_options: Annotated[dict[Text, Any], Field(max_length=100)] = Field(default_factory=dict)
    """Variables of the template in addition to messages and tools, such as `{enable_thinking: false}`."""
    system_prompt: str | None = None
    """System message of prompts without a system message."""
    template_time: str | None = None
    """Date or time for chat templates that use the current time, such as 2025-11-25 or 2025-11-25 09:30:00. Null: the
    start time of the run, which checkpoints contain. Evaluations and dry runs use their own start time."""
    max_prompt_tokens: PositiveInt = 1024
    """Maximum length of a prompt after tokenisation (OpenRLHF's default)."""
    overlong_prompts: Literal["drop", "truncate", "error"] = "drop"
    """Treatment of longer prompts. `drop`: they are counted and skipped. `truncate`: the beginning of the last user
    message is cut and the chat is rendered again, or the beginning of a plain text is cut. `error`: an error is
    raised."""
    shuffle: bool = True
    """Whether to draw a new order in each epoch, determined by the seed. If false, prompts have file order."""

    @property
    def sources(self) -> dict[str, DataSourceSettings]:
        """Sources of training prompts, sorted by name. A single source has the name ""."""
        if self.train is not None:
            return {"": self.train}
        return dict(sorted((self.mixture or {}).items()))

    @property
    def evaluated(self) -> dict[str, ValidationSetSettings]:
        """Validation sets, sorted by name. `validation` has the name ""."""
        sets = dict(sorted((self.validation_sets or {}).items()))
        if self.validation is None:
            return sets
        return {"": ValidationSetSettings.model_validate(self.validation.model_dump()), **sets}

    @property
    def thresholds(self) -> dict[str, float]:
        """Value of `right_above` for each name in `evaluated`."""
        return {name: settings.right_above for name, settings in self.evaluated.items()}

    @field_validator("chat_template")
    @classmethod
    def _is_a_template(cls, template: str | None) -> str | None:
        if template is None or is_template(template):
            return template
        raise ValueError(
            f"{show(template)} is not a file next to the configuration or in {Path.cwd()}, and not a template with "
            "{{ or {%; give the path of a file"
        )

    @field_validator("chat_template_options")
    @classmethod
    def _has_valid_names(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name in options:
            if name in _RESERVED_VARIABLES:
                raise ValueError(f"{name} is set by {_RESERVED_VARIABLES[name]}; remove it")
            if not (name.isascii() and name.isidentifier() and not keyword.iskeyword(name)):
                raise ValueError(
                    f"{show(name)} is not a valid variable name; use letters, digits and _, no digit first"
                )
        return options

    @field_validator("template_time")
    @classmethod
    def _is_a_time(cls, time: str | None) -> str | None:
        try:
            return time if time is None else datetime.fromisoformat(time).isoformat(" ")
        except ValueError:
            raise ValueError(f"{show(time)} is not a time; write it as 2025-11-25 or 2025-11-25 09:30:00") from None

    def broken_rules(self) -> Iterator[str]:
        yield from rule_of_one("set exactly one of these settings", train=self.train, mixture=self.mixture)
        for key, names in (("mixture", self.mixture), ("validation_sets", self.validation_sets)):
            if names is not None and not names:
                yield f"{key} is empty; add a name with a source, or set {key} to null"
            for name in names or ():  # part of names of metrics and files
                if not (name.isascii() and name.isidentifier() and len(name) <= _LONGEST_NAME_CHARACTERS):
                    yield (
                        f"{key} has {show(name)}, which is not a valid name of metrics; use letters, digits and _, no "
                        f"digit first, at most {_LONGEST_NAME_CHARACTERS} characters"
                    )
