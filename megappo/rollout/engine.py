"""What every generation engine can do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How to generate."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    greedy: bool = False
    """Take the most likely token; log-probabilities are still those of the scaled distribution."""


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt. The response depends on weights, prompt, seed and parameters, not on its neighbours."""

    token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Completion:
    """One response."""

    token_ids: tuple[int, ...]
    """As sampled, at least one; the stop token is included."""
    logprobs: tuple[float, ...]
    """Natural logarithms, of the temperature-scaled distribution."""
    truncated: bool
    """max_new_tokens ended it."""
    weight_version: int


class Engine(Protocol):
    """Token ids in, token ids and log-probabilities out."""

    @property
    def version(self) -> int:
        """Version of the weights it holds; 0 before the first update."""
        ...

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Completion]:
        """Complete every request, in order. Raises RuntimeError without a complete set of weights or asleep."""
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take a whole set of weights by Hugging Face names, one tensor at a time.

        The stream is consumed to its end whatever happens. Every parameter must arrive exactly once in its shape;
        otherwise ValueError names the tensors, the version stays and `generate` refuses until a whole set arrived.
        """
        ...

    def sleep(self) -> None:
        """Give the device's memory to the trainer; the weights may be lost."""
        ...

    def wake(self) -> None:
        """Take memory again; weights must be updated where `sleep` lost them."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
