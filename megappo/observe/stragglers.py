"""Detects ranks that delay the others."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

_MUCH_SLOWER = 1.5
_LEAST_SECONDS = 1.0
_QUIET_STEPS = 20


class Stragglers:
    """Reports the slowest rank of a stage where it is far behind; the same stage at most every 20 steps."""

    def __init__(self) -> None:
        self._last_said: dict[str, int] = {}

    def observe(self, step: int, seconds: Mapping[str, Sequence[float]]) -> list[str]:
        """A sentence per stage with a straggler. `seconds`: the times of all ranks by stage.

        Stages in which ranks wait for each other take all of them equally long and show none.
        """
        said = []
        for stage, of_rank in seconds.items():
            slowest, usual = max(of_rank), statistics.median_low(of_rank)
            is_far_behind = slowest > _MUCH_SLOWER * usual and slowest > usual + _LEAST_SECONDS
            if is_far_behind and step - self._last_said.get(stage, -_QUIET_STEPS) >= _QUIET_STEPS:
                self._last_said[stage] = step
                said.append(
                    f"rank {of_rank.index(slowest)} was the slowest in {stage} with {slowest:.1f} seconds, half of the "
                    f"ranks took at most {usual:.1f}: look at its machine, or at the lengths it was given."
                )
        return said
