"""Views of the samples of a saved step: one line per sample, the tokens of a sample, and sums over all tokens.

This module reads the files of `megappo.ppo.experience_files` without torch. Texts are from a model and must be escaped
for display. Suffixes of names: B samples, N response tokens of all samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megappo.errors import reason
from megappo.observe.ends import End, end_of_older_version
from megappo.observe.parquet_files import ColumnFile, Numbers

DATA_SOURCE = "data_source"
"""Column and metadata key for the task of a sample, as in the files of verl."""
TOKEN_TEXTS = "response_token_texts"
"""Column with the text of each response token."""
END, EPISODE = "end", "episode"
"""Columns for the end of a sample, and for the episode as JSON."""
_ENDS = (END, EPISODE)
TURN_REWARDS = "turn_rewards"
"""Column with the environment's reward at the end of each turn."""
ALONE = {"reward": "reward_without_turns", "score": "score_without_turns"}
"""Columns without the rewards of turns, for `reward` and `score`, which include the rewards of turns."""
_TOKENS, _MASK, _LOSS_MASK = "response_tokens", "response_mask", "loss_mask"
_TOKEN_COLUMNS = {
    "mask": _MASK, "loss": _LOSS_MASK, "reward": "token_rewards", "kl": "kl", "value": "values", "return": "returns",
    "advantage": "advantages", "ratio": "ratios", "version": "token_versions",
}  # fmt: skip
"""Columns of the values that are shown for each token. Some runs lack some columns."""
SPREAD_OVER_TOKENS = ("ratio", "value", "advantage")
"""Token values with a distribution on the page."""
_OLD_LOGPROBS = "old_logprobs"
_NUMBERS = ("sample_id", "group_id", "reward", "score", "truncated", "weight_version")
_OF_TURNS = (TURN_REWARDS, *ALONE.values())
_TEXTS = ("prompt", "response", "raw_response", "answer", DATA_SOURCE, "reward_failure")


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
    texts: Sequence[str] | None
    """Text of each token; None in files of older versions."""
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


def no_samples(path: Path, error: Exception) -> ValueError:
    """Return the error for a file without saved samples."""
    return ValueError(f"{path} contains no saved samples ({reason(error)}); name the saved experience of a run")


@contextmanager
def _samples_of(path: Path) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise no_samples(path, error) from error


def read_lines(path: Path) -> list[SampleLine]:
    """Return a line for each sample of a file. Raises ValueError if the file is damaged or contains no samples."""
    with _samples_of(path):
        return _lines(ColumnFile(path, (*_NUMBERS, *_TEXTS, *_ENDS, *_OF_TURNS, _MASK)))


def ends_of(file: ColumnFile) -> list[End]:
    """Return the end of each sample of a file. Raises ValueError if the file contains unknown ends."""
    if END in file:
        return [End(text or "") for text in file.texts(END)]
    limits = [json.loads(text)["limit"] for text in file.plain(EPISODE)] if EPISODE in file else [""] * len(file)
    truncated = file.numbers("truncated").tolist()
    return [end_of_older_version(limit, truncated=was) for limit, was in zip(limits, truncated, strict=True)]


def _with_turns(file: ColumnFile, name: str) -> Numbers:
    """Return the column `reward` or `score`, including the rewards of turns: (B,). In files of older versions, the
    columns do not include the rewards of turns. This function adds the rewards."""
    numbers = file.numbers(name)
    if TURN_REWARDS not in file or ALONE[name] in file:
        return numbers
    import numpy as np

    (lengths, rewards_N), (own_lengths, own_N) = file.lists(TURN_REWARDS), file.lists(_MASK)
    if lengths != own_lengths:
        raise ValueError(f"columns {TURN_REWARDS} and {_MASK} differ in length")
    own_N = own_N.astype(bool)
    sample_N = np.repeat(np.arange(len(lengths)), lengths)
    return numbers + np.bincount(sample_N[own_N], rewards_N[own_N], minlength=len(lengths))


def _episode_failures(file: ColumnFile) -> list[str]:
    if EPISODE not in file:
        return [""] * len(file)
    episodes = [json.loads(text) for text in file.plain(EPISODE)]
    return [f"{x['failure']}: {x['reason']}" if x["failure"] else "" for x in episodes]


def _lines(file: ColumnFile) -> list[SampleLine]:
    numbers = {name: file.numbers(name).tolist() for name in _NUMBERS}
    numbers |= {name: _with_turns(file, name).tolist() for name in ALONE}
    texts = {name: file.texts(name) for name in _TEXTS}
    lengths, ends, failures = file.lists(_MASK)[0], ends_of(file), _episode_failures(file)
    return [
        SampleLine(
            sample_id=int(numbers["sample_id"][b]),
            group_id=int(numbers["group_id"][b]),
            reward=float(numbers["reward"][b]),
            score=float(numbers["score"][b]),
            length=lengths[b],
            end=ends[b],
            weight_version=int(numbers["weight_version"][b]),
            prompt=texts["prompt"][b] or "",
            response=texts["response"][b] or "",
            raw_response=texts["raw_response"][b] or "",
            answer=texts["answer"][b],
            data_source=texts[DATA_SOURCE][b],
            reward_failure=texts["reward_failure"][b] or "",
            episode_failure=failures[b],
        )
        for b in range(len(file))
    ]


def read_sample(path: Path, place: int) -> tuple[SampleLine, SampleTokens, StepSums]:
    """Return the sample at a position of a file. Raises ValueError as `read_lines` does."""
    with _samples_of(path):
        columns = (*_NUMBERS, *_TEXTS, *_ENDS, *_OF_TURNS, _TOKENS, TOKEN_TEXTS, *_TOKEN_COLUMNS.values())
        file = ColumnFile(path, columns).row(place)
        line = _lines(file)[0]
        return line, _tokens_of(file), _sums([file])


def _tokens_of(file: ColumnFile) -> SampleTokens:
    """Return the tokens of a file with one sample."""
    ids: list[int] = file.lists(_TOKENS)[1].tolist()
    columns = {name: file.lists(column)[1].tolist() for name, column in _token_columns(file).items()}
    columns.setdefault("version", file.numbers("weight_version").tolist() * len(ids))
    if columns["loss"] == columns["mask"]:
        del columns["loss"]
    texts = file.text_lists(TOKEN_TEXTS)[0] if TOKEN_TEXTS in file else None
    if texts is not None and len(texts) != len(ids):
        raise ValueError(f"{len(texts)} texts of {len(ids)} tokens")
    return SampleTokens(ids, texts, columns)


def _token_columns(file: ColumnFile) -> dict[str, str]:
    """Return the columns of token values in the file by value. Raises ValueError if the lengths of columns differ."""
    columns = {name: column for name, column in _TOKEN_COLUMNS.items() if column in file}
    lengths = file.lists(_TOKENS)[0]
    for column in columns.values():
        if file.lists(column)[0] != lengths:
            raise ValueError(f"columns {column} and {_TOKENS} differ in length")
    return columns


@dataclass(frozen=True)
class StepNumbers:
    """Numbers for the distributions of a step."""

    rewards_B: Numbers
    """Training rewards, including the rewards of turns."""
    lengths_B: Numbers
    """Number of response tokens of each sample."""
    tokens: Mapping[str, Numbers]
    """Values of all own tokens: `ratio`, `value` and `advantage`. Values that the run did not compute are absent."""


def read_numbers(paths: Sequence[Path]) -> StepNumbers:
    """Return the numbers of all samples of the files. Raises ValueError as `read_lines` does."""
    import numpy as np

    rewards, lengths, tokens = list[Numbers](), list[int](), dict[str, list[Numbers]]()
    for path in paths:
        with _samples_of(path):
            of_tokens = (_TOKEN_COLUMNS[name] for name in SPREAD_OVER_TOKENS)
            file = ColumnFile(path, ("reward", *_OF_TURNS, _TOKENS, _MASK, *of_tokens))
            columns = _token_columns(file)
            own_N = file.lists(_MASK)[1].astype(bool)
            rewards.append(_with_turns(file, "reward"))
            lengths += file.lists(_MASK)[0]
            for name in SPREAD_OVER_TOKENS:
                if name in columns:
                    tokens.setdefault(name, []).append(file.lists(columns[name])[1][own_N])
    joined = {name: np.concatenate(parts) for name, parts in tokens.items()}
    return StepNumbers(np.concatenate(rewards), np.asarray(lengths), joined)


def read_tokens(path: Path, places: Sequence[int]) -> list[tuple[SampleTokens, Sequence[float]]]:
    """Return the tokens of the samples at the given positions of a file, and the log-probabilities (nats) of the tokens
    under the policy before the step's updates. Raises ValueError as `read_lines` does."""
    with _samples_of(path):
        columns = ("weight_version", _TOKENS, TOKEN_TEXTS, _OLD_LOGPROBS, *_TOKEN_COLUMNS.values())
        file = ColumnFile(path, columns)
        rows = [file.row(place) for place in places]
        return [(_tokens_of(row), row.lists(_OLD_LOGPROBS)[1].tolist()) for row in rows]


def read_sums(paths: Sequence[Path]) -> StepSums:
    """Return sums over the tokens of all samples of the files. Raises ValueError as `read_lines` does."""
    files = []
    for path in paths:
        with _samples_of(path):
            files.append(ColumnFile(path, (_TOKENS, *_TOKEN_COLUMNS.values())))
            _token_columns(files[-1])
    with _samples_of(paths[0].parent):
        return _sums(files)


def _sums(files: Sequence[ColumnFile]) -> StepSums:
    import numpy as np

    def of_tokens(name: str) -> Numbers:
        return np.concatenate([file.lists(_TOKEN_COLUMNS[name])[1] for file in files])

    lengths = [length for file in files for length in file.lists(_MASK)[0]]
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
    if all(_TOKEN_COLUMNS["value"] in file for file in files):
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
