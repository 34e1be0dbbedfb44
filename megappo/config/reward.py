"""Settings of rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megappo.config.base import (
    Fraction,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Processes,
    Seconds,
    Settings,
    Text,
    rule_of_one,
)
from megappo.config.hub import may_be_hub_name
from megappo.config.judge import JudgeSettings, address_rules
from megappo.config.own_server import RewardModelServerSettings
from megappo.config.server_words import own_word_rules
from megappo.errors import link_to_nothing
from megappo.observe.json_values import JSONValue

_TAKEN_NAMES = (
    "mean", "std", "min", "max", "failures", "timeouts", "overlong", "given", "clipped", "running_mean",
    "running_std", "group_spread",
)  # fmt: skip
"""Names of metrics `reward/...` that every run has, which a function cannot take."""
MODEL = "model"
"""The name of the reward model among functions."""
JUDGE = "megappo.rewards.judge:scores"
"""Import path of the function that asks a judge."""
SERVER = "megappo.rewards.http:scores"
"""Import path of the function that asks a reward server."""
_STARTING_SECONDS = 5.0
_Score = Annotated[float, Field(ge=-1e9, le=1e9)]


class OverlongSettings(Settings):
    buffer_tokens: PositiveInt
    """Number of tokens before the limit in which an answer is punished, linearly more from one to the next."""
    penalty: Annotated[PositiveFloat, Field(le=1e9)] = 1.0
    """Score that an answer at the limit loses."""


class RewardTermSettings(Settings):
    function: Text | None = None
    """A rule, or `package.module:function`."""
    judge: JudgeSettings | None = None
    """A language model that judges answers, in place of `function`."""
    weight: float = Field(default=1.0, ge=-1e9, le=1e9)
    """Factor of the score in the sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    batch: bool = False
    """The Python function takes lists and returns a list, one score per sample."""
    data_sources: Annotated[list[Text], Field(min_length=1)] | None = None
    """Values of a prompt's `data_source` that the function scores; it adds nothing to other prompts; null: all."""

    def broken_rules(self) -> Iterator[str]:
        yield from rule_of_one(function=self.function, judge=self.judge)
        yield from _judge_alone(self.judge, self.options, batch=self.batch)


class RemoteModelSettings(Settings):
    url: Text
    """Where a server holds the model: SGLang's with `--is-embedding`, or another that answers token ids at `/classify`
    as it does, such as http://10.0.0.5:30000."""
    key: Text | None = None
    """Name of the environment variable that holds the server's key; null: the server wants none."""
    concurrency: Annotated[int, Field(gt=0, le=4096)] = 64
    """Most requests of a rank at the same time, one for each sample."""
    timeout_seconds: Seconds = 120.0
    """Longest time of a request, tries included, after which its sample has failed."""
    retries: NonNegativeInt = 10
    """How often a request is sent again in that time, after growing pauses, where the server fails."""

    def broken_rules(self) -> Iterator[str]:
        yield from address_rules(self.url, self.key, "http://HOST:PORT")


class RewardSettings(Settings):
    function: Text | None = None
    """`exact`, `number`, `gsm8k`, `math_verify`, `reasoning_gym`, `model`, `package.module:function`, or `environment`:
    nothing but what `rollout.environment` gives, which other functions' scores are added to. Default: `functions`.
    """
    functions: dict[str, RewardTermSettings] = Field(default_factory=dict)
    """Several functions in place of `function`, each by a name, under which its mean is a metric (`reward/NAME`): a
    mapping of names to `{function, weight, options, batch, data_sources}` or `{judge, weight, data_sources}`. The
    reward is their weighted sum."""
    judge: JudgeSettings | None = None
    """A language model that reads and scores answers, in place of `function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    batch: bool = False
    """The Python function takes lists and returns a list, one score per sample."""
    workers: Processes | None = None
    """Worker processes per rank, of each function; default: half of its share of the machine's cores, 8 at most, and
    one with `batch`."""
    timeout_seconds: Seconds = 10.0
    """Time limit per sample; a worker that exceeds it is killed and replaced."""
    worker_memory_gigabytes: PositiveFloat = 8.0
    """Memory (GB, 1e9 bytes) from which a worker is replaced after its samples, so that a function that leaks does not
    end the run. A worker that holds twice as much is killed, and the sample that it is scoring has failed."""
    failure_score: float = Field(default=0.0, ge=-1e9, le=1e9)
    """Score of a sample whose reward failed or ran out of time."""
    max_failure_fraction: Fraction = 0.5
    """The run stops when more than this fraction of a step's rewards failed."""
    overlong: OverlongSettings | None = None
    """Not null: answers near the length limit of `rollout.max_response_tokens` lose a part of their score (DAPO)."""
    truncated_score: _Score | None = None
    """Score of a sample that `rollout.max_response_tokens` or `rollout.max_total_tokens` ended, in place of the
    function's (ORZ: 0); null: the function's."""
    truncated_penalty: Annotated[float, Field(ge=0.0, le=1e9)] = 0.0
    """Score that such a sample loses (TRL's penalty for a missing end)."""
    normalize: Literal["std", "mean_std"] | None = None
    """How training scales scores after these penalties: divided by their standard deviation over all samples so far
    (`std`), with their mean subtracted before (`mean_std`); null: not at all. A checkpoint keeps both numbers."""
    scale: Annotated[PositiveFloat, Field(le=1e9)] = 1.0
    """Factor of all scores in training, after `normalize`."""
    shift: float = Field(default=0.0, ge=-1e9, le=1e9)
    """Number added to all scores in training, after `scale`."""
    clip: Annotated[tuple[_Score, _Score], Field(strict=False)] | None = None
    """Lowest and highest score in training, after `shift`, such as [-10, 10]; null: no bounds."""
    model_path: PathText | None = None
    """Folder or hub name of the reward model (AutoModelForSequenceClassification) for `function: model`."""
    model_server: RewardModelServerSettings | None = None
    """Not null, `{}` for its defaults: one process of the run holds the reward model for all ranks, in place of a copy
    on each."""
    model_remote: RemoteModelSettings | None = None
    """Not null: a server elsewhere holds the reward model; only configuration and tokenizer of `model_path` are
    read."""

    @property
    def is_shaped(self) -> bool:
        """Whether training changes the scores that functions give."""
        penalties = (self.overlong, self.truncated_score, self.truncated_penalty or None)
        return self.is_rescaled or any(penalty is not None for penalty in penalties)

    @property
    def is_rescaled(self) -> bool:
        """Whether training gives scores another unit or bounds."""
        return (self.normalize, self.scale, self.shift, self.clip) != (None, 1.0, 0.0, None)

    @property
    def model_holder(self) -> str:
        """Who loads a reward model, for people."""
        if self.model_remote is not None:
            return f"the server at {self.model_remote.url} has loaded"
        if self.model_server is not None:
            return f"one process on machine {self.model_server.machine} for all ranks loads"
        return "every rank loads"

    def model_dtype(self, *, on_cuda: bool) -> Literal["float32", "bfloat16"]:
        """Type in which a reward model computes."""
        return "bfloat16" if on_cuda else "float32"

    @property
    def asks_model(self) -> bool:
        """Whether the reward model is the function, or one of them."""
        return any(term.function == MODEL for _, term in self.terms.values())

    def is_for(self, term: str, metadata: Mapping[str, JSONValue]) -> bool:
        """Whether one of `terms` scores the answers to a prompt with this metadata."""
        chosen = self.functions[term].data_sources if term else None
        return chosen is None or metadata.get("data_source") in chosen

    @property
    def terms(self) -> dict[str, tuple[float, RewardSettings]]:
        """(weight, settings with this function alone) of each function, by its name; a single one has the name ""."""
        if self.function is not None:
            return {"": (1.0, self)}
        if self.judge is not None:
            return {"": (1.0, self._alone(self))}
        return {name: (term.weight, self._alone(term)) for name, term in self.functions.items()}

    def _alone(self, term: RewardTermSettings | RewardSettings) -> RewardSettings:
        """The settings for one function alone; a judge is a function of many samples at once."""
        together = term.batch or term.judge is not None
        own = {"function": term.function or JUDGE, "judge": term.judge, "options": term.options, "functions": {}}
        return self.model_copy(update={**own, "batch": together, "workers": 1 if together else self.workers})

    def call_seconds(self, samples: int) -> float:
        """Time limit of one call of the function with so many samples."""
        if self.judge is not None:
            rounds, own = -(-samples // self.judge.concurrency), self.judge.server
            away = 2 * own.start_timeout_seconds if own is not None else 0.0  # at its first start, or when it has died
            return _STARTING_SECONDS + away + rounds * self.judge.timeout_seconds
        return self.timeout_seconds * (samples if self.batch else 1)

    @property
    def judges(self) -> dict[str, JudgeSettings]:
        """Judges among the functions, by the names of their metrics."""
        return {name or "judge": term.judge for name, (_, term) in self.terms.items() if term.judge is not None}

    def key_of(self, judge: str) -> str:
        """Dotted key of the settings of one of `judges`."""
        return "reward.judge" if self.judge is not None else f"reward.functions.{judge}.judge"

    @property
    def summary(self) -> str:
        """The functions, for people."""
        return ", ".join("a judge" if term.judge else str(term.function) for _, term in self.terms.values())

    def broken_rules(self) -> Iterator[str]:
        yield from rule_of_one(function=self.function, judge=self.judge, functions=self.functions or None)
        if self.functions and (self.options or self.batch):
            yield "options and batch are those of a single function; write them into functions"
        yield from _judge_alone(self.judge, self.options, batch=self.batch)
        for name, term in self.functions.items():
            if not name.isidentifier() or name in _TAKEN_NAMES:
                yield f"functions has '{name}', which is no name of a metric of its own; use letters, digits and _"
            if term.function == "environment":
                yield "functions has 'environment', which stands alone; set function to it"
        if [term.function for term in self.functions.values()].count(MODEL) > 1:
            yield "functions has 'model' twice, and there is one reward model; remove one of them"
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            yield f"clip is {list(self.clip)}, must be a lower and a higher number, such as [-10, 10]"
        if self.asks_model != (self.model_path is not None):
            yield "model_path belongs to function: model; set both or neither"
        if self.model_server is not None and self.model_path is None:
            yield "model_server holds the model of model_path, which is null; set both or neither"
        if self.model_remote is not None and self.model_path is None:
            yield "model_remote is asked with the tokenizer of model_path, which is null; set both or neither"
        if self.model_remote is not None and self.model_server is not None:
            yield "model_server and model_remote are both given; the model is in one of them, remove the other"


def reward_rules(reward: RewardSettings) -> Iterator[str]:
    """Rules: files and models in the settings exist, and judges are valid."""
    path = reward.model_path
    if path is not None and (link := link_to_nothing(Path(path))):
        yield f"reward.model_path: {link}"
    elif path is not None and not Path(path).is_dir() and not may_be_hub_name(path):
        yield (
            f"reward.model_path '{path}' is not a folder (from {Path.cwd()}); give the folder of a sequence "
            "classification model, or a hub name such as Skywork/Skywork-Reward-V2-Qwen3-0.6B"
        )
    for name, judge in reward.judges.items():
        try:
            _ = judge.template
        except ValueError as error:
            yield f"{reward.key_of(name)}.{error}"
        if judge.server is not None:
            yield from own_word_rules(judge.server.arguments, f"{reward.key_of(name)}.server.arguments")
        if judge.folder_problem is not None:
            yield f"{reward.key_of(name)}.{judge.folder_problem}"


def _judge_alone(judge: JudgeSettings | None, options: Mapping[str, JSONValue], *, batch: bool) -> Iterator[str]:
    if judge is not None and (options or batch):
        yield "options and batch are those of a function; a judge has settings of its own, so remove them"
