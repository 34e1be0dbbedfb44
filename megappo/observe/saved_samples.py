"""Reader of saved experience: the saved steps of a folder, and views of their samples.

A view has one line per sample, the tokens of a sample, or sums over all tokens. This module reads the files of
`megappo.ppo.records.experience_files` without torch. Texts are from a model and must be escaped for display. Suffixes
of names: B samples, N response tokens of all samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic_core import ErrorDetails

from megappo.errors import reason
from megappo.files.parquet_files import ColumnFile, Numbers
from megappo.files.plain_files import plain_text
from megappo.observe.ends import End

MARKER = "step.json"
"""Name of the file that is written last in the folder of a step. The folder is complete if the file exists."""
_MOST_RANKS = 1 << 20
"""Upper bound of ranks, far above useful values. A crafted marker must not cost minutes or all memory."""
DATA_SOURCE = "data_source"
"""Column and metadata key for the task of a sample, as in the files of verl."""
TOKEN_TEXTS = "response_token_texts"
"""Column with the text of each response token."""
END, EPISODE = "end", "episode"
"""Columns for the end of a sample, and for the episode as JSON."""
TURN_REWARDS = "turn_rewards"
"""Column with the environment's reward at the end of each turn."""
ALONE = {"reward": "reward_without_turns", "score": "score_without_turns"}
"""Columns without the rewards of turns, for `reward` and `score`, which include the rewards of turns."""
_TOKENS, _MASK = "response_tokens", "response_mask"
_TOKEN_COLUMNS = {
    "mask": _MASK, "loss": "loss_mask", "reward": "token_rewards", "kl": "kl", "value": "values", "return": "returns",
    "advantage": "advantages", "ratio": "ratios", "version": "token_versions",
}  # fmt: skip
"""Columns of the values that are shown for each token."""
_OPTIONAL = ("kl", "value", "version")
"""Token values that some runs do not save."""
SPREAD_OVER_TOKENS = ("ratio", "value", "advantage")
"""Token values with a distribution on the page."""


@checked_dataclass(frozen=True, config=ConfigDict(strict=True))
class SavedStep:
    """A step with saved experience, as described by its marker file."""

    folder: Path
    step: int
    run: str
    """Directory of the run that saved the step."""
    ranks: Annotated[int, Field(ge=1, le=_MOST_RANKS)]
    """Number of ranks of that run. Each rank wrote one file."""
    saved: Annotated[int, Field(ge=1)]
    """Number of samples in the folder."""
    prompts_per_step: Annotated[int, Field(ge=1)]
    samples_per_prompt: Annotated[int, Field(ge=1)]
    temperature: float
    vocabulary: str | None = None
    """`vocabulary_digest` of that run's tokenizer. The value is None in folders of earlier versions."""
    min_response_tokens: int | None = None
    """`rollout.min_response_tokens` of that run. The value is None in folders of earlier versions."""

    @property
    def is_whole(self) -> bool:
        """Whether all samples of the step were saved."""
        return self.saved == self.prompts_per_step * self.samples_per_prompt

    def file(self, rank: int) -> Path:
        """Return the path of a rank's samples."""
        return self.folder / f"rank-{rank:05d}.parquet"

    @property
    def files(self) -> list[Path]:
        """Paths of the samples of all ranks."""
        return [self.file(rank) for rank in range(self.ranks)]


def folder_of_step(folder: Path, step: int) -> Path:
    """Return the folder of a step, in saved experience or in a record of arrivals."""
    return folder / f"step-{step:06d}"


def saved_steps(folder: Path) -> dict[int, SavedStep]:
    """Return the steps in a folder of experience in ascending order. Raises ValueError if a marker cannot be read."""
    saved_by_step = {}
    for marker in sorted(folder.glob(f"step-*/{MARKER}")):
        try:
            step = SavedStep(folder=marker.parent, **json.loads(plain_text(marker)))
        except (OSError, ValueError, TypeError) as error:
            why = ", ".join(map(_problem, error.errors())) if isinstance(error, ValidationError) else reason(error)
            raise ValueError(f"{marker} cannot be read ({why}); restore the folder as it was saved") from error
        saved_by_step[step.step] = step
    return saved_by_step


def _problem(detail: ErrorDetails) -> str:
    """Format a pydantic error as its location and its message."""
    return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"


@dataclass(frozen=True)
class SampleLine:
    """A sample without its tokens."""

    sample_id: int
    """Position of the sample in the step's global batch."""
    group_id: int
    """Position of the prompt in the step; negative for a failed episode."""
    reward: float
    """Training reward, including the rewards of all turns."""
    score: float
    """Score of the reward function plus the rewards of turns, before `reward.scale` and similar settings are applied.
    `samples.jsonl` contains this number."""
    length: int
    """Number of response tokens, including tokens of an environment."""
    end: End
    """Why the response or its episode ended."""
    weight_version: int
    """Version of the weights that generated the response; the oldest of several versions."""
    prompt: str
    response: str
    raw_response: str
    """Response with special tokens as text."""
    answer: str | None
    """Reference answer; None if the data contain no answer."""
    data_source: str | None
    reward_failure: str
    """The reason that the sample has no score; "" if the sample has a score."""
    episode_failure: str
    """The reason that the episode failed; "" if the episode did not fail, or if the run has no environment."""


@dataclass(frozen=True)
class SampleTokens:
    """The response tokens of a sample."""

    ids: Sequence[int]
    texts: Sequence[str]
    """Text of each token."""
    columns: Mapping[str, Sequence[float]]
    """Values of each token by name: `mask`, `loss`, `reward`, `kl`, `value`, `return`, `advantage`, `ratio` and
    `version`. Values that the run did not compute are absent."""


@dataclass(frozen=True)
class TokenSpread:
    """Mean and standard deviation of token values; NaN without tokens."""

    mean: float
    std: float

    @classmethod
    def of(cls, numbers_N: Numbers) -> TokenSpread:
        """Compute the mean and the standard deviation in float64."""
        if not len(numbers_N):
            return cls(float("nan"), float("nan"))
        numbers_N = numbers_N.astype("float64")
        return cls(float(numbers_N.mean()), float(numbers_N.std()))


@dataclass(frozen=True)
class StepSums:
    """Sums over the tokens of samples, to check GAE. Means are over own tokens, the tokens that the model generated."""

    tokens: int
    own: int
    counted: int
    """Number of own tokens in the losses."""
    reward: float
    """Mean over samples of the sum of token rewards."""
    reward_at_end: float
    """Share of the absolute token rewards on the last own token of a sample; NaN if all rewards are 0."""
    reward_elsewhere: float
    """Share of the absolute token rewards on tokens of an environment; must be 0."""
    first_return: float
    """Mean return of the first own token."""
    return_gap: float
    """Mean absolute difference between `first_return` and the sum of rewards; 0 if gamma and the critic's lambda are
    1."""
    returns: TokenSpread
    advantages: TokenSpread
    values: TokenSpread | None
    explained_variance: float
    """1 - Var(return - value) / Var(return) of own tokens; NaN without a critic."""
    correlation: float
    """Correlation of values and returns."""


@dataclass(frozen=True)
class StepNumbers:
    """Numbers for the distributions of a step."""

    rewards_B: Numbers
    """Training rewards, including the rewards of turns."""
    lengths_B: Numbers
    """Number of response tokens of each sample."""
    tokens: Mapping[str, Numbers]
    """Values of all own tokens: `ratio`, `value` and `advantage`. Values that the run did not compute are absent."""


@contextmanager
def samples_in(path: Path) -> Iterator[ColumnFile]:
    """Yield the columns of a file of saved samples. Raises ValueError if the file is damaged, or if the block raises an
    error for a file without saved samples."""
    file = ColumnFile(path)
    try:
        yield file
    except (TypeError, ValueError, RuntimeError, KeyError, OverflowError) as error:
        raise ValueError(
            f"{path} contains no saved samples ({reason(error)}); name the saved experience of a run"
        ) from error


def read_lines(path: Path) -> list[SampleLine]:
    """Return a line for each sample of a file. Raises ValueError if the file is damaged or contains no samples."""
    with samples_in(path) as file:
        return _lines(file)


def ends_of(file: ColumnFile) -> list[End]:
    """Return the end of each sample of a file. Raises ValueError if the file contains unknown ends."""
    return [End(text or "") for text in file.texts(END)]


def _episode_failures(file: ColumnFile) -> list[str]:
    if EPISODE not in file:
        return [""] * len(file)
    episodes = [json.loads(text) for text in file.plain(EPISODE)]
    return [f"{x['failure']}: {x['reason']}" if x["failure"] else "" for x in episodes]


def _lines(file: ColumnFile) -> list[SampleLine]:
    def texts(name: str) -> list[str]:
        return [text or "" for text in file.texts(name)]

    columns = {
        "sample_id": map(int, file.numbers("sample_id").tolist()),
        "group_id": map(int, file.numbers("group_id").tolist()),
        "reward": map(float, file.numbers("reward").tolist()),
        "score": map(float, file.numbers("score").tolist()),
        "length": file.lists(_MASK)[0],
        "end": ends_of(file),
        "weight_version": map(int, file.numbers("weight_version").tolist()),
        "prompt": texts("prompt"),
        "response": texts("response"),
        "raw_response": texts("raw_response"),
        "answer": file.texts("answer"),
        "data_source": file.texts(DATA_SOURCE),
        "reward_failure": texts("reward_failure"),
        "episode_failure": _episode_failures(file),
    }
    return [SampleLine(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def read_sample(path: Path, place: int) -> tuple[SampleLine, SampleTokens, StepSums]:
    """Return the sample at a position of a file. Raises ValueError as `read_lines` does."""
    with samples_in(path) as file:
        row = file.row(place)
        return _lines(row)[0], _tokens_of(row), _sums(row.lists(_MASK)[0], [_token_numbers(row)])


def read_tokens(path: Path, places: Sequence[int]) -> list[tuple[SampleTokens, Sequence[float]]]:
    """Return the tokens of the samples at the given positions of a file, and the log-probabilities (nats) of the tokens
    under the policy before the step's updates. Raises ValueError as `read_lines` does."""
    with samples_in(path) as file:
        rows = [file.row(place) for place in places]
        return [(_tokens_of(row), row.lists("old_logprobs")[1].tolist()) for row in rows]


def _tokens_of(file: ColumnFile) -> SampleTokens:
    """Return the tokens of a file with one sample."""
    ids: list[int] = file.lists(_TOKENS)[1].tolist()
    columns = {name: numbers.tolist() for name, numbers in _token_numbers(file).items()}
    columns.setdefault("version", file.numbers("weight_version").tolist() * len(ids))
    if columns["loss"] == columns["mask"]:
        del columns["loss"]
    texts = file.text_lists(TOKEN_TEXTS)[0]
    if len(texts) != len(ids):
        raise ValueError(f"{len(texts)} texts of {len(ids)} tokens")
    return SampleTokens(ids, texts, columns)


def _token_numbers(file: ColumnFile) -> dict[str, Numbers]:
    """Return the token values in the file by name. Raises ValueError if the lengths of columns differ, or if a column
    that every run saves is missing."""
    lengths, numbers = file.lists(_TOKENS)[0], dict[str, Numbers]()
    for name, column in _TOKEN_COLUMNS.items():
        if column in file or name not in _OPTIONAL:
            own_lengths, numbers[name] = file.lists(column)
            if own_lengths != lengths:
                raise ValueError(f"columns {column} and {_TOKENS} differ in length")
    return numbers


def read_numbers(paths: Sequence[Path]) -> StepNumbers:
    """Return the numbers of all samples of the files. Raises ValueError as `read_lines` does."""
    import numpy as np

    rewards, lengths, tokens = list[Numbers](), list[int](), dict[str, list[Numbers]]()
    for path in paths:
        with samples_in(path) as file:
            numbers = _token_numbers(file)
            own_N = numbers["mask"].astype(bool)
            rewards.append(file.numbers("reward"))
            lengths += file.lists(_MASK)[0]
            for name in SPREAD_OVER_TOKENS:
                if name in numbers:
                    tokens.setdefault(name, []).append(numbers[name][own_N])
    joined = {name: np.concatenate(parts) for name, parts in tokens.items()}
    return StepNumbers(np.concatenate(rewards), np.asarray(lengths), joined)


def read_sums(paths: Sequence[Path]) -> StepSums:
    """Return sums over the tokens of all samples of the files. Raises ValueError as `read_lines` does."""
    lengths, columns = list[int](), list[dict[str, Numbers]]()
    for path in paths:
        with samples_in(path) as file:
            lengths += file.lists(_MASK)[0]
            columns.append(_token_numbers(file))
    return _sums(lengths, columns)


def _sums(lengths: Sequence[int], columns: Sequence[Mapping[str, Numbers]]) -> StepSums:
    import numpy as np

    def of_tokens(name: str) -> Numbers:
        return np.concatenate([numbers[name] for numbers in columns])

    sample_N = np.repeat(np.arange(len(lengths)), lengths)
    own_N, rewards_N, returns_N = of_tokens("mask").astype(bool), of_tokens("reward"), of_tokens("return")
    places = np.flatnonzero(own_N)
    spoken, first = np.unique(sample_N[places], return_index=True)
    last = np.append(first[1:], len(places)) - 1
    totals = np.bincount(sample_N[places], rewards_N[places], minlength=len(lengths))[spoken]
    sizes_N = np.abs(rewards_N.astype("float64"))
    whole = float(sizes_N.sum()) or float("nan")
    first_returns = returns_N[places[first]]
    returns, values = returns_N[places].astype("float64"), None
    explained = correlation = float("nan")
    if all("value" in numbers for numbers in columns):
        values = of_tokens("value")[places].astype("float64")
        if len(returns) and returns.var() > 0:
            explained = float(1 - (returns - values).var() / returns.var())
            correlation = float(np.corrcoef(returns, values)[0, 1]) if values.var() > 0 else 0.0
    return StepSums(
        tokens=len(own_N),
        own=len(places),
        counted=int(of_tokens("loss").astype(bool).sum()),
        reward=TokenSpread.of(totals).mean,
        reward_at_end=float(sizes_N[places[last]].sum()) / whole,
        reward_elsewhere=float(sizes_N[~own_N].sum()) / whole,
        first_return=TokenSpread.of(first_returns).mean,
        return_gap=TokenSpread.of(np.abs(first_returns - totals)).mean,
        returns=TokenSpread.of(returns),
        advantages=TokenSpread.of(of_tokens("advantage")[places]),
        values=None if values is None else TokenSpread.of(values),
        explained_variance=explained,
        correlation=correlation,
    )
