"""Detects ranks that delay the others."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

_MUCH_SLOWER = 1.5
_LEAST_SECONDS = 1.0
_QUIET_STEPS = 20


class Stragglers:
    """Reports the slowest rank of a stage that is far behind, at most every 20 steps for each stage."""

    def __init__(self) -> None:
        self._last_steps: dict[str, int] = {}

    def observe(self, step: int, seconds: Mapping[str, Sequence[float]]) -> list[str]:
        """Return a sentence for each stage with a straggler. `seconds`: times of all ranks by stage.

        A stage in which ranks wait for each other has equal times on all ranks, and no straggler.
        """
        sentences = []
        for stage, of_rank in seconds.items():
            slowest, usual = max(of_rank), statistics.median_low(of_rank)
            is_far_behind = slowest > _MUCH_SLOWER * usual and slowest > usual + _LEAST_SECONDS
            if is_far_behind and step - self._last_steps.get(stage, -_QUIET_STEPS) >= _QUIET_STEPS:
                self._last_steps[stage] = step
                sentences.append(
                    f"rank {of_rank.index(slowest)} was the slowest in {stage} with {slowest:.1f} seconds, half of the "
                    f"ranks took at most {usual:.1f}: check the machine of the rank, or the lengths of its samples."
                )
        return sentences
