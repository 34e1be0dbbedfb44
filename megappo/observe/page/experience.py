"""Distributions and samples of steps with saved experience, limited to the size of a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.files.json_values import JSONValue
from megappo.files.parquet_files import Numbers
from megappo.observe.ends import End
from megappo.observe.page.curves import rounded
from megappo.observe.page.records import text_of
from megappo.observe.saved_samples import SPREAD_OVER_TOKENS, SampleLine, read_lines, read_numbers, read_tokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SavedFiles = Mapping[int, Sequence[Path]]
"""Files of each saved step, one per rank."""
_HISTOGRAM_STEPS, _SAMPLE_STEPS, _SAMPLES_PER_STEP = 40, 5, 24
_MOST_TOKENS, _TOKENS_PER_SAMPLE = 24_000, 1_500
"""Maximum number of tokens of all samples of a page, about 2 MB, and of one sample."""
_RESPONSE_CHARACTERS, _TOKEN_CHARACTERS = 400, 40
_BINS = 30
_LEFT_OUT = 0.001
"""Share of the numbers at each end that the outermost bins also count, so that one outlier does not determine the
scale."""
_EQUAL_SPREAD = 1e-4
"""Spread divided by the largest number, or by 1 for smaller numbers. Numbers below this limit differ only by rounding
and share one bin."""
_DIGITS = 4
_COLUMNS = ("value", "advantage", "return", "kl", "reward", "ratio", "version")


def spread(numbers: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the numbers, evenly spread, including the first and the last number."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[round(at * (len(numbers) - 1) / (most - 1))] for at in range(most)]


def histograms(saved: SavedFiles) -> dict[str, JSONValue]:
    """Return histograms of each saved step: `steps`, and for each quantity `edges` of bins and `shares` of the numbers
    of the step. Raises ValueError if files cannot be read."""
    steps = spread(sorted(saved), _HISTOGRAM_STEPS)
    numbers = [read_numbers(saved[step]) for step in steps]
    by_quantity: dict[str, JSONValue] = {
        "reward": _binned([of.rewards_B for of in numbers]),
        "length": _binned([of.lengths_B for of in numbers]),
    }
    for name in SPREAD_OVER_TOKENS:
        if all(name in of.tokens for of in numbers):
            by_quantity[name] = _binned([of.tokens[name] for of in numbers])
    return {"steps": steps, "of": {name: binned for name, binned in by_quantity.items() if binned is not None}}


def _binned(of_steps: Sequence[Numbers]) -> dict[str, JSONValue] | None:
    """Return common bins of all steps, and the shares of each step. Return None if no number is finite."""
    import numpy as np

    finite = [numbers[np.isfinite(numbers)].astype("float64") for numbers in of_steps]
    together = np.concatenate(finite)
    if not len(together):
        return None
    edges = _edges(together)
    counts = [np.histogram(np.clip(numbers, edges[0], edges[-1]), edges)[0] for numbers in finite]
    shares = [[rounded(float(share), 3) for share in count / max(1, count.sum())] for count in counts]
    return {"edges": [rounded(float(edge), 6) for edge in edges], "shares": shares}


def _edges(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return edges of bins: one bin per number for few distinct numbers, otherwise bins of equal width."""
    import numpy as np

    distinct = np.unique(numbers)
    scale = max(1.0, abs(float(distinct[-1])))
    if distinct[-1] - distinct[0] < _EQUAL_SPREAD * scale:
        middle, half = (distinct[0] + distinct[-1]) / 2, 10 * _EQUAL_SPREAD * scale
        return np.asarray([middle - half, middle + half])
    if len(distinct) <= _BINS:
        between = (distinct[1:] + distinct[:-1]) / 2
        return np.asarray([2 * distinct[0] - between[0], *between, 2 * distinct[-1] - between[-1]])
    low, high = np.quantile(numbers, (_LEFT_OUT, 1 - _LEFT_OUT))
    if not low < high:
        low, high = distinct[0], distinct[-1]
    return np.linspace(low, high, _BINS + 1)


def saved_samples(saved: SavedFiles, share: float) -> list[dict[str, JSONValue]]:
    """Return samples of some saved steps with tokens, from the latest step to the first. The samples of a step are
    spread evenly over the rewards of the step, including the lowest and the highest reward.

    Args:
        share: maximum share of the tokens of the page for these samples.

    Raises ValueError if files cannot be read.
    """
    steps = spread(sorted(saved), _SAMPLE_STEPS)
    budget = int(_MOST_TOKENS * share / max(1, len(steps)))
    return [sample for step in reversed(steps) for sample in _of_step(step, saved[step], budget)]


def _of_step(step: int, files: Sequence[Path], budget_tokens: int) -> Iterator[dict[str, JSONValue]]:
    lines = [(path, place, line) for path in files for place, line in enumerate(read_lines(path))]
    by_reward = sorted(range(len(lines)), key=lambda at: (lines[at][2].reward, lines[at][2].sample_id))
    chosen = sorted(_affordable([lines[at] for at in spread(by_reward, _SAMPLES_PER_STEP)], budget_tokens),
                    key=lambda item: item[2].sample_id)  # fmt: skip
    for path in files:
        of_file = [(place, line) for where, place, line in chosen if where == path]
        for (_, line), (tokens, logprobs) in zip(of_file, read_tokens(path, [at for at, _ in of_file]), strict=True):
            shown = slice(_TOKENS_PER_SAMPLE)
            own = [bool(x) for x in tokens.columns["mask"][shown]]
            columns = {"logprob": logprobs, **{n: tokens.columns[n] for n in _COLUMNS if n in tokens.columns}}
            yield {
                **_about(step, line),
                "tokens": [text_of(text, _TOKEN_CHARACTERS) for text in tokens.texts[shown]],
                "own": [int(x) for x in own],
                "columns": [[name, _shown(name, numbers[shown], own)] for name, numbers in columns.items()],
            }


def _affordable(
    lines: Sequence[tuple[Path, int, SampleLine]], budget_tokens: int
) -> Iterator[tuple[Path, int, SampleLine]]:
    """Yield lines from the lowest and the highest rewards to the middle, while the tokens fit the budget. Yield at
    least one line."""
    order = sorted(range(len(lines)), key=lambda at: (min(at, len(lines) - 1 - at), at))
    for count, at in enumerate(order):
        budget_tokens -= min(lines[at][2].length, _TOKENS_PER_SAMPLE)
        if count and budget_tokens < 0:
            return
        yield lines[at]


def _about(step: int, line: SampleLine) -> dict[str, JSONValue]:
    return {
        "step": step,
        "id": line.sample_id,
        "reward": rounded(line.reward, _DIGITS),
        "length": line.length,
        "end": None if line.end is End.COMPLETE else line.end.description,
        "prompt": text_of(line.prompt),
        "response": text_of(line.raw_response, _RESPONSE_CHARACTERS),
        "answer": None if line.answer is None else text_of(line.answer),
        "failure": text_of(line.reward_failure or line.episode_failure) or None,
    }


def _shown(name: str, numbers: Sequence[float], own: Sequence[bool]) -> list[float | None]:
    """Return the numbers of tokens. Tokens of an environment have only a reward and a version."""
    is_of_all = name in ("reward", "version")
    return [rounded(float(x), _DIGITS) if is_of_all or mine else None for x, mine in zip(numbers, own, strict=True)]
