"""Settings of rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megappo.config.base import (
    Fraction,
    PathText,
    PositiveFloat,
    PositiveInt,
    Processes,
    Seconds,
    Settings,
    Text,
    rule_of_one,
)
from megappo.config.sections.judge import JudgeSettings
from megappo.config.sections.own_server import OwnServerSettings, RequestSettings, RewardModelServerSettings
from megappo.config.sections.server_words import own_word_rules
from megappo.errors import link_to_nothing
from megappo.files.json_values import JSONValue
from megappo.models.hub import may_be_hub_name

_TAKEN_NAMES = (
    "mean", "std", "min", "max", "failures", "timeouts", "overlong", "given", "clipped", "running_mean",
    "running_std", "group_spread",
)  # fmt: skip
"""Names of metrics `reward/...` that every run logs. A reward function cannot have one of these names."""
MODEL = "model"
"""Name of the reward model among reward functions."""
MODEL_SERVER = "reward model"
"""Name of the server of the reward model. The name has a space, so no judge can have the same name."""
JUDGE = "megappo.rewards.judge:scores"
"""Import path of the function that sends requests to a judge."""
SERVER = "megappo.rewards.http:scores"
"""Import path of the function that sends requests to a reward server."""
_STARTING_SECONDS = 5.0
_Score = Annotated[float, Field(ge=-1e9, le=1e9)]


def server_name(name: str) -> str:
    """Return the name in logs of a server in `RewardSettings.own_servers`."""
    return name if name in ("judge", MODEL_SERVER) else f"judge {name}"


class OverlongSettings(Settings):
    buffer_tokens: PositiveInt
    """Number of last tokens before the limit with a penalty. The penalty grows linearly over these tokens."""
    penalty: Annotated[PositiveFloat, Field(le=1e9)] = 1.0
    """Penalty of an answer at the limit, subtracted from its score."""


class _FunctionSettings(Settings):
    """Settings of one reward function, alone or among several."""

    function: Text | None = None
    """Built-in rule, `file.py:function` or `package.module:function`."""
    judge: JudgeSettings | None = None
    """Language model that judges answers, instead of `function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    batch: bool = False
    """Whether the Python function takes lists and returns a list with one score per sample."""

    def broken_rules(self) -> Iterator[str]:
        if self.judge is not None and (self.options or self.batch):
            yield "options and batch belong to a function, but a judge is set; remove options and batch"


class RewardTermSettings(_FunctionSettings):
    weight: float = Field(default=1.0, ge=-1e9, le=1e9)
    """Factor of the score in the sum."""
    data_sources: Annotated[list[Text], Field(min_length=1)] | None = None
    """Values of `data_source` of the prompts that the function scores. The function adds nothing to other prompts.
    Null: all prompts."""

    def broken_rules(self) -> Iterator[str]:
        yield from rule_of_one(function=self.function, judge=self.judge)
        yield from super().broken_rules()


class RemoteModelSettings(RequestSettings):
    url: Text
    """Address of a server with the model, such as http://10.0.0.5:30000: SGLang with `--is-embedding`, or a server
    that accepts token ids at `/classify` in the same format."""

    def broken_rules(self) -> Iterator[str]:
        yield from self.address_rules("http://HOST:PORT")


class RewardSettings(_FunctionSettings):
    function: Text | None = None
    """`exact`, `number`, `gsm8k`, `math_verify`, `reasoning_gym`, `model`, `environment`,
    `file.py:function`, or `package.module:function`. With `environment`, the score is the reward of
    `rollout.environment` alone. Scores of other functions are added to that reward. Default: `functions`."""
    functions: dict[str, RewardTermSettings] = Field(default_factory=dict)
    """Several named functions instead of `function`: a mapping from names to `{function, weight, options, batch,
    data_sources}` or `{judge, weight, data_sources}`. The reward is the weighted sum of the scores. The metric
    `reward/NAME` is the mean score of a function."""
    workers: Processes | None = None
    """Number of worker processes per rank for each function. Default: half of the rank's share of the machine's cores,
    at most 8, and 1 with `batch`."""
    timeout_seconds: Seconds = 10.0
    """Time limit per sample. A worker that exceeds the limit is killed and replaced."""
    worker_memory_gigabytes: PositiveFloat = 8.0
    """Memory (GB, 1e9 bytes) above which a worker is replaced after its samples, so that a memory leak does not end
    the run. A worker with more than twice this memory is killed, and its current sample has failed."""
    failure_score: float = Field(default=0.0, ge=-1e9, le=1e9)
    """Score of a sample if its reward failed or exceeded the time limit."""
    max_failure_fraction: Fraction = 0.5
    """Maximum fraction of failed rewards of a step. The run stops above this fraction."""
    overlong: OverlongSettings | None = None
    """Not null: penalty for answers near the limit `rollout.max_response_tokens` (DAPO)."""
    truncated_score: _Score | None = None
    """Score of a sample that `rollout.max_response_tokens` or `rollout.max_total_tokens` ended (ORZ: 0). Null: the
    score of the function."""
    truncated_penalty: Annotated[float, Field(ge=0.0, le=1e9)] = 0.0
    """Penalty of such a sample, subtracted from its score (TRL's penalty for a missing end)."""
    normalize: Literal["std", "mean_std"] | None = None
    """Normalization of scores after these penalties. `std` divides by the standard deviation over all samples so far.
    `mean_std` subtracts the mean first. Null: no normalization. A checkpoint contains both numbers."""
    scale: Annotated[PositiveFloat, Field(le=1e9)] = 1.0
    """Factor of all training scores, after `normalize`."""
    shift: float = Field(default=0.0, ge=-1e9, le=1e9)
    """Number added to all training scores, after `scale`."""
    clip: Annotated[tuple[_Score, _Score], Field(strict=False)] | None = None
    """Lower and upper bound of training scores, after `shift`, such as [-10, 10]. Null: no bounds."""
    model_path: PathText | None = None
    """Folder or hub name of the reward model (AutoModelForSequenceClassification) for `function: model`."""
    model_server: RewardModelServerSettings | None = None
    """Not null (`{}` for defaults): one process of the run loads the reward model for all ranks, instead of a copy per
    rank."""
    model_remote: RemoteModelSettings | None = None
    """Not null: an external server has the reward model. The run reads only configuration and tokenizer of
    `model_path`."""

    @property
    def is_shaped(self) -> bool:
        """Whether training changes the scores of the functions."""
        penalties = (self.overlong, self.truncated_score, self.truncated_penalty or None)
        return self.is_rescaled or any(penalty is not None for penalty in penalties)

    @property
    def is_rescaled(self) -> bool:
        """Whether training changes the scale or the bounds of scores."""
        return (self.normalize, self.scale, self.shift, self.clip) != (None, 1.0, 0.0, None)

    @property
    def model_holder(self) -> str:
        """Readable text about the process that loads a reward model."""
        if self.model_remote is not None:
            return f"the server at {self.model_remote.url} has loaded"
        if self.model_server is not None:
            return f"one process on machine {self.model_server.machine} for all ranks loads"
        return "every rank loads"

    def model_dtype(self, *, on_cuda: bool) -> Literal["float32", "bfloat16"]:
        """Return the data type in which a reward model computes."""
        return "bfloat16" if on_cuda else "float32"

    @property
    def asks_model(self) -> bool:
        """Whether the reward model is one of the functions."""
        return any(term.function == MODEL for _, term in self.terms.values())

    def is_for(self, term: str, metadata: Mapping[str, JSONValue]) -> bool:
        """Return whether a function of `terms` scores the answers to a prompt with this metadata."""
        chosen = self.functions[term].data_sources if term else None
        return chosen is None or metadata.get("data_source") in chosen

    @property
    def terms(self) -> dict[str, tuple[float, RewardSettings]]:
        """(weight, settings with only this function) for each function name. A single function has the name ""."""
        if self.function is not None:
            return {"": (1.0, self)}
        if self.judge is not None:
            return {"": (1.0, self._alone(self))}
        return {name: (term.weight, self._alone(term)) for name, term in self.functions.items()}

    def _alone(self, term: RewardTermSettings | RewardSettings) -> RewardSettings:
        """Return settings with only this function. A judge is a function of many samples at once."""
        together = term.batch or term.judge is not None
        own = {"function": term.function or JUDGE, "judge": term.judge, "options": term.options, "functions": {}}
        return self.model_copy(update={**own, "batch": together, "workers": 1 if together else self.workers})

    def call_seconds(self, samples: int) -> float:
        """Return the time limit in seconds of a function call with `samples` samples."""
        if self.judge is not None:
            rounds, own = -(-samples // self.judge.concurrency), self.judge.server
            away = 2 * own.start_timeout_seconds if own is not None else 0.0  # first start, or restart after a crash
            return _STARTING_SECONDS + away + rounds * self.judge.timeout_seconds
        return self.timeout_seconds * (samples if self.batch else 1)

    @property
    def judges(self) -> dict[str, JudgeSettings]:
        """Judges among the functions, by the names of their metrics."""
        return {name or "judge": term.judge for name, (_, term) in self.terms.items() if term.judge is not None}

    @property
    def own_servers(self) -> dict[str, tuple[str, OwnServerSettings]]:
        """(dotted key, settings) of each server that the run starts, by the name of its judge or `MODEL_SERVER`."""
        servers: dict[str, tuple[str, OwnServerSettings | None]] = {
            MODEL_SERVER: ("reward.model_server", self.model_server),
            **{name: (f"{self.key_of(name)}.server", judge.server) for name, judge in self.judges.items()},
        }
        return {name: (key, server) for name, (key, server) in servers.items() if server is not None}

    def key_of(self, judge: str) -> str:
        """Return the dotted key of the settings of a judge in `judges`."""
        return "reward.judge" if self.judge is not None else f"reward.functions.{judge}.judge"

    @property
    def summary(self) -> str:
        """Readable list of the functions."""
        return ", ".join("a judge" if term.judge else str(term.function) for _, term in self.terms.values())

    def broken_rules(self) -> Iterator[str]:
        yield from rule_of_one(function=self.function, judge=self.judge, functions=self.functions or None)
        if self.functions and (self.options or self.batch):
            yield "options and batch belong to a single function; move them to the entries of functions"
        yield from super().broken_rules()
        for name, term in self.functions.items():
            if not name.isidentifier() or name in _TAKEN_NAMES:
                yield f"functions has '{name}', which is not a valid or free metric name; use letters, digits and _"
            if term.function == "environment":
                yield "functions has 'environment', which cannot be combined; set function: environment"
        if [term.function for term in self.functions.values()].count(MODEL) > 1:
            yield "functions has 'model' twice, but a run has one reward model; remove one of them"
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            yield f"clip is {list(self.clip)}, must be a lower and an upper bound, such as [-10, 10]"
        if self.asks_model != (self.model_path is not None):
            yield "model_path belongs to function: model; set both or neither"
        if self.model_server is not None and self.model_path is None:
            yield "model_server needs the model of model_path, which is null; set both or neither"
        if self.model_remote is not None and self.model_path is None:
            yield "model_remote needs the tokenizer of model_path, which is null; set both or neither"
        if self.model_remote is not None and self.model_server is not None:
            yield "model_server and model_remote are both given; remove one of them"


def reward_rules(reward: RewardSettings) -> Iterator[str]:
    """Yield a sentence for each missing file or model, and for each invalid judge."""
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
