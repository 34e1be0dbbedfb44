"""Lengths of responses that a benchmark settles, the same for every program that calls transformers' `generate`.

A sequence cannot end before its length, and ends there: the end token's score is -inf before and the only finite one at
its place.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = ("full", "even", "tail", "natural")


@dataclass(frozen=True)
class Profile:
    """Distribution of the lengths of a step's responses, the end token included."""

    shape: str
    """`full`: all of the longest; `even`: spread evenly; `tail`: log-normal; `natural`: as the model ends them."""
    longest: int
    other: int = 0
    """`even`: the shortest; `tail`: the mean."""

    @classmethod
    def read(cls, text: str) -> Profile:
        """Profile from `full:64`, `even:1-64`, `tail:32-256` or `natural:64`. Raises ValueError for anything else."""
        shape, _, numbers = text.partition(":")
        try:
            counts = [int(number) for number in numbers.split("-")]
        except ValueError:
            counts = []
        wanted = 2 if shape in ("even", "tail") else 1
        if shape not in SHAPES or len(counts) != wanted or min(counts) < 1 or counts != sorted(counts):
            raise ValueError(
                f"'{text}' is no profile of lengths; give full:64, even:1-64, tail:32-256 (mean and longest) "
                "or natural:64 with numbers of your own"
            )
        return cls(shape, counts[-1], counts[0] if wanted == 2 else 0)

    def __str__(self) -> str:
        return f"{self.shape}:{self.other}-{self.longest}" if self.other else f"{self.shape}:{self.longest}"

    def of_step(self, samples: int, step: int, seed: int = 7) -> list[int] | None:
        """Lengths of a step's samples: every step has the same ones in another order. None for natural lengths."""
        match self.shape:
            case "natural":
                return None
            case "full":
                return [self.longest] * samples
            case "even":
                wide = self.longest - self.other
                lengths = [self.other + round(wide * i / max(1, samples - 1)) for i in range(samples)]
            case _:
                lengths = _log_normal(samples, self.other, self.longest)
        random.Random(f"{seed}/{step}").shuffle(lengths)
        return lengths


def _log_normal(samples: int, mean: int, longest: int) -> list[int]:
    """Quantiles of the log-normal distribution whose largest is `longest` and whose mean is `mean`."""
    scores = [statistics.NormalDist().inv_cdf((i + 0.5) / samples) for i in range(samples)]

    def quantiles(sigma: float) -> list[int]:
        return [max(1, round(longest * math.exp(sigma * (z - scores[-1])))) for z in scores]

    low, high = 0.0, 10.0  # the mean falls from `longest` as sigma grows
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if statistics.mean(quantiles(middle)) > mean else (low, middle)
    return quantiles(high)


class _EndsAt:
    """Scores of sequences that end at their lengths; `LogitsProcessor` in all but name, as torch is not loaded yet."""

    def __init__(self, lengths: Sequence[int], prompt_tokens: int, end: int, never: Sequence[int]) -> None:
        self._lengths, self._prompt_tokens, self._end, self._never = lengths, prompt_tokens, end, list(never)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        number = input_ids.shape[1] - self._prompt_tokens + 1  # of the token that is chosen now
        scores[:, self._never] = -math.inf
        ending = [row for row, length in enumerate(self._lengths) if length == number]
        scores[ending] = -math.inf
        scores[ending, self._end] = 0.0
        return scores


class Forcing:
    """Gives the sequences of each `generate` the lengths that come next."""

    def __init__(self, end: int, never: Sequence[int]) -> None:
        self._end, self._never = end, never
        self._left: list[int] = []

    def begin(self, lengths: Sequence[int]) -> None:
        """Set the lengths of a step's sequences, in the order in which they are generated."""
        self._left = list(lengths)

    def take(self, count: int) -> list[int]:
        """The next lengths. Raises RuntimeError where fewer are left."""
        if len(self._left) < count:
            raise RuntimeError(f"{count} sequences are generated, and {len(self._left)} lengths are left")
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context, force the lengths in every call of transformers' `generate` in this process."""
        from unittest.mock import patch

        from transformers import GenerationMixin, LogitsProcessorList

        really = GenerationMixin.generate

        def generate(model: Any, input_ids: Tensor, logits_processor: Any = (), **given: Any) -> Any:
            ends = _EndsAt(self.take(len(input_ids)), input_ids.shape[1], self._end, self._never)
            processors = LogitsProcessorList([ends, *logits_processor])
            return really(model, input_ids=input_ids, logits_processor=processors, **given)

        with patch.object(GenerationMixin, "generate", generate):
            yield
