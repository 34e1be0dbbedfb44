"""Fixed response lengths for every program that calls transformers' `generate`.

A sequence ends exactly at its length. Before this length, the score of the end token is -inf. At this length, only
the end token has a finite score.
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
    """Distribution of the response lengths of a step, including the end token."""

    shape: str
    """`full`: all lengths are `longest`; `even`: evenly spaced; `tail`: log-normal; `natural`: the model ends
    responses."""
    longest: int
    other: int = 0
    """Shortest length for `even`, mean length for `tail`."""

    @classmethod
    def read(cls, text: str) -> Profile:
        """Parse `full:64`, `even:1-64`, `tail:32-256` or `natural:64`. Raises ValueError for other texts."""
        shape, _, numbers = text.partition(":")
        try:
            counts = [int(number) for number in numbers.split("-")]
        except ValueError:
            counts = []
        expected = 2 if shape in ("even", "tail") else 1
        if shape not in SHAPES or len(counts) != expected or min(counts) < 1 or counts != sorted(counts):
            raise ValueError(
                f"'{text}' is no profile of lengths; give full:64, even:1-64, tail:32-256 (mean and longest) "
                "or natural:64, with any numbers"
            )
        return cls(shape, counts[-1], counts[0] if expected == 2 else 0)

    def __str__(self) -> str:
        return f"{self.shape}:{self.other}-{self.longest}" if self.other else f"{self.shape}:{self.longest}"

    def of_step(self, samples: int, step: int, seed: int = 7) -> list[int] | None:
        """Return the lengths of a step's samples, or None for natural lengths. All steps have the same lengths in
        different orders."""
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
    """Return quantiles of the log-normal distribution with maximum `longest` and mean `mean`."""
    scores = [statistics.NormalDist().inv_cdf((i + 0.5) / samples) for i in range(samples)]

    def quantiles(sigma: float) -> list[int]:
        return [max(1, round(longest * math.exp(sigma * (z - scores[-1])))) for z in scores]

    low, high = 0.0, 10.0  # the mean decreases from `longest` as sigma increases
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if statistics.mean(quantiles(middle)) > mean else (low, middle)
    return quantiles(high)


class _EndsAt:
    """Scores for sequences that end at given lengths. The class has the interface of `LogitsProcessor`, but does not
    import torch."""

    def __init__(self, lengths: Sequence[int], prompt_tokens: int, end: int, never: Sequence[int]) -> None:
        self._lengths, self._prompt_tokens, self._end, self._never = lengths, prompt_tokens, end, list(never)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        number = input_ids.shape[1] - self._prompt_tokens + 1  # number of the current token
        scores[:, self._never] = -math.inf
        ending = [row for row, length in enumerate(self._lengths) if length == number]
        scores[ending] = -math.inf
        scores[ending, self._end] = 0.0
        return scores


class Forcing:
    """Sequence lengths for the calls of `generate`."""

    def __init__(self, end: int, never: Sequence[int]) -> None:
        self._end, self._never = end, never
        self._left: list[int] = []

    def begin(self, lengths: Sequence[int]) -> None:
        """Set the lengths of a step's sequences, in the order in which they are generated."""
        self._left = list(lengths)

    def take(self, count: int) -> list[int]:
        """Return the next lengths. Raises RuntimeError if too few lengths remain."""
        if len(self._left) < count:
            raise RuntimeError(f"{count} sequences are generated, but only {len(self._left)} lengths are left")
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Force the lengths in every call of transformers' `generate` in this process, within the context."""
        from unittest.mock import patch

        from transformers import GenerationMixin, LogitsProcessorList

        really = GenerationMixin.generate

        def generate(model: Any, input_ids: Tensor, logits_processor: Any = (), **arguments: Any) -> Any:
            ends = _EndsAt(self.take(len(input_ids)), input_ids.shape[1], self._end, self._never)
            processors = LogitsProcessorList([ends, *logits_processor])
            return really(model, input_ids=input_ids, logits_processor=processors, **arguments)

        with patch.object(GenerationMixin, "generate", generate):
            yield
