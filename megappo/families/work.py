"""What it takes to run a sample through a model."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.families.architecture import ArchitectureConfig
from megappo.families.parameters import multiplied_parameters


@dataclass(frozen=True)
class SampleCost:
    """The work that a sample is, in FLOPs: of its tokens, and of the pairs of tokens that attend to each other.

    In microbatches of equal tokens the one that holds a single long sample takes longest.
    """

    of_token: int
    of_pair: int
    window: int | None = None
    """Tokens each token sees, itself included; None: all before it."""

    def of(self, tokens: int) -> int:
        """Of a sample of so many tokens, of which each sees itself and those before it."""
        seen = tokens if self.window is None else min(tokens, self.window)
        pairs = seen * (seen + 1) // 2 + (tokens - seen) * seen
        return tokens * self.of_token + pairs * self.of_pair


def sample_cost(arch: ArchitectureConfig) -> SampleCost:
    """Forward and backward of a model (Chowdhery et al. 2022, appendix B, with the causal mask discounted)."""
    of_pair = 12 * arch.layers * arch.query_width
    return SampleCost(6 * multiplied_parameters(arch), of_pair, arch.sliding_window)
