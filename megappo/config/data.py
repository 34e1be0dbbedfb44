"""Settings of prompts: those that are trained on, those that are evaluated, and what becomes of them."""

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

OLD_PYTHON_PREFIX = "python:"
"""Prefix of import paths in older settings, before all plug-ins were named in the same way; still accepted."""
HUB_PREFIX = "datasets:"
"""Prefix of sources that Hugging Face's library `datasets` reads."""
_LONGEST_NAME_CHARACTERS = 60
_LARGEST_REWARD = 1e9
_Reward = Annotated[float, Field(ge=-_LARGEST_REWARD, le=_LARGEST_REWARD)]


_TOLD_ALREADY = {
    "messages": "the data",
    "tools": "rollout.environment, where it has some",
    "add_generation_prompt": "what is rendered",
    "strftime_now": "data.template_time",
}
"""Variables of chat templates that a run sets itself."""


def is_template(text: str) -> bool:
    """Whether this is the text of a chat template rather than the path of one."""
    return "{{" in text or "{%" in text


class DataSourceSettings(Settings):
    source: PathText
    """`FILE.jsonl`, `FILE.parquet`, a pattern of several such as `data/part-*.parquet`, `datasets:NAME` or
    `datasets:FOLDER`, after which `:SPLIT` or `:CONFIG:SPLIT` may stand, `reasoning_gym:TASK`, or
    `package.module:function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reasoning-gym task or the Python function."""
    prompt_key: Text = "prompt"
    """Field of a line, row or record with the prompt: a string or a list of chat messages."""
    answer_key: Text = "answer"
    """Field with the reference answer for the reward. In a parquet file of verl's schema it is
    `reward_model.ground_truth`, unless this names a column."""
    limit: PositiveInt | None = None
    """Use only the first so many records."""

    @field_validator("source")
    @classmethod
    def _names_a_data_set(cls, source: str) -> str:
        source = source.removeprefix(OLD_PYTHON_PREFIX)
        if source.startswith(HUB_PREFIX):  # a folder may follow
            source = HUB_PREFIX + expanded(source.removeprefix(HUB_PREFIX))
        parts = source.split(":")[1:]
        if source.startswith(HUB_PREFIX) and not (len(parts) <= 3 and all(parts)):
            raise ValueError(
                f"{show(source)} is no data set; write datasets:NAME, datasets:NAME:SPLIT or datasets:NAME:CONFIG:SPLIT"
            )
        return source


class MixedSourceSettings(DataSourceSettings):
    weight: float = Field(default=1.0, ge=1e-6, le=1e6)
    """The source's share of the prompts, by the weights of all."""


class ValidationSetSettings(DataSourceSettings):
    samples: int = Field(default=1, gt=0, le=1024)
    """Answers to each prompt."""
    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    """Sampling temperature; 0: greedy answers."""
    pass_at: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = ()
    """The k of each `pass@k`: the probability that one of k answers is right, estimated without bias."""
    right_above: _Reward = 0.5
    """An answer is right where its reward is above this."""

    def broken_rules(self) -> Iterator[str]:
        above = max(self.pass_at, default=0)
        if above > self.samples:
            yield (
                f"pass_at has {above}, which needs at least so many samples, and samples is {self.samples}; "
                "raise samples, or remove it"
            )
        twice = [k for k, count in Counter(self.pass_at).items() if count > 1]
        if twice:
            yield f"pass_at has {twice[0]} more than once; keep one"
        if self.samples > 1 and self.temperature == 0.0:
            yield (
                f"samples {self.samples} at temperature 0 are the same answer each time; set temperature above 0, or "
                "samples to 1"
            )


class CurriculumSettings(Settings):
    right_above: _Reward
    """A prompt rests where the mean reward of its samples in a step is above this."""
    rest_epochs: Annotated[int, Field(gt=0, le=10_000)] = 1
    """Passes over its source from which a resting prompt is left out, beginning with the next pass."""
    most_resting: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Largest part of a source that a pass leaves out. Where more prompts would rest, those whose rest ends first take
    part; among equals, the last in the source take part."""


class DataSettings(Settings):
    train: DataSourceSettings | None = None
    """Prompts to train on. Either this or `mixture` is given."""
    mixture: dict[str, MixedSourceSettings] | None = None
    """Several sources in place of `train`, each by a name, under which its metrics stand (`source/NAME/...`): a mapping
    of names to the settings of a source and its `weight`, 1 by default."""
    curriculum: CurriculumSettings | None = None
    """Not null: prompts that are answered well rest for some passes over their source."""
    validation: DataSourceSettings | None = None
    """Prompts of the periodic evaluation and of `megappo eval`, each answered once and greedily."""
    validation_sets: dict[str, ValidationSetSettings] | None = None
    """Further validation sets, each by a name, under which its metrics stand (`eval/NAME/...`): a mapping of names to
    the settings of a source with `samples` (1), `temperature` (0: greedy), `pass_at` (such as [1, 4]) and `right_above`
    (0.5)."""
    apply_chat_template: bool = True
    """Render prompts with the tokenizer's chat template; false: prompts are plain text."""
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """Template in place of the tokenizer's: a file beside the configuration, or else in the working directory, whose
    text becomes the setting, or the text. Exported models have it."""
    chat_template_options: Annotated[dict[Text, Any], Field(max_length=100)] = Field(default_factory=dict)
    """Variables that the template receives besides messages and tools, by its own names: `{enable_thinking: false}`."""
    system_prompt: str | None = None
    """System message put before prompts that have none."""
    template_time: str | None = None
    """Date or time for chat templates that ask for one, such as 2025-11-25 or 2025-11-25 09:30:00. Null: when the run
    began, which its checkpoints hold; for an evaluation or a dry run the time at which it starts."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt after tokenisation (OpenRLHF's default)."""
    overlong_prompts: Literal["drop", "truncate", "error"] = "drop"
    """What happens to longer prompts. `drop`: they are counted and left out. `truncate`: the beginning of the last user
    message is cut, and the chat is rendered again; of a plain text the beginning is cut. `error`: they are refused."""
    shuffle: bool = True
    """Draw a new order each epoch, deterministic by the seed; false: file order."""

    @property
    def sources(self) -> dict[str, DataSourceSettings]:
        """Sources of training prompts, in the order of their names; a single one has the name ""."""
        if self.train is not None:
            return {"": self.train}
        return dict(sorted((self.mixture or {}).items()))

    @property
    def evaluated(self) -> dict[str, ValidationSetSettings]:
        """Validation sets in the order of their names; `validation` has the name ""."""
        sets = dict(sorted((self.validation_sets or {}).items()))
        if self.validation is None:
            return sets
        return {"": ValidationSetSettings.model_validate(self.validation.model_dump()), **sets}

    @property
    def thresholds(self) -> dict[str, float]:
        """`right_above` of each validation set, by the names in `evaluated`."""
        return {name: settings.right_above for name, settings in self.evaluated.items()}

    @field_validator("chat_template")
    @classmethod
    def _is_a_template(cls, template: str | None) -> str | None:
        if template is None or is_template(template):
            return template
        raise ValueError(
            f"{show(template)} is no file beside the configuration or in {Path.cwd()}, and no template, which has "
            "{{ or {%; give the path of a file"
        )

    @field_validator("chat_template_options")
    @classmethod
    def _can_be_told(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name in options:
            if name in _TOLD_ALREADY:
                raise ValueError(f"{name} is told by {_TOLD_ALREADY[name]}; remove it")
            if not (name.isascii() and name.isidentifier() and not keyword.iskeyword(name)):
                raise ValueError(f"{show(name)} is no name in a template; use letters, digits and _, no digit first")
        return options

    @field_validator("template_time")
    @classmethod
    def _is_a_time(cls, time: str | None) -> str | None:
        try:
            return time if time is None else datetime.fromisoformat(time).isoformat(" ")
        except ValueError:
            raise ValueError(f"{show(time)} is no time; write it as 2025-11-25 or 2025-11-25 09:30:00") from None

    def broken_rules(self) -> Iterator[str]:
        yield from rule_of_one("give one of them, the other one is null", train=self.train, mixture=self.mixture)
        for key, names in (("mixture", self.mixture), ("validation_sets", self.validation_sets)):
            if names is not None and not names:
                yield f"{key} is empty; write a name and a source into it, or set it to null"
            for name in names or ():  # part of a metric's name, and of a file's
                if not (name.isascii() and name.isidentifier() and len(name) <= _LONGEST_NAME_CHARACTERS):
                    yield (
                        f"{key} has {show(name)}, which is no name of metrics; use letters, digits and _, no digit "
                        f"first, at most {_LONGEST_NAME_CHARACTERS} of them"
                    )
