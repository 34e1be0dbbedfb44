"""Scores of responses: rules, Python functions in killable workers, reward models.

Names are imported when they are asked for: worker processes import this package and must start quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megappo.rewards.registry import check_reward
    from megappo.rewards.scorer import RewardScorer
    from megappo.rewards.workers import RewardError

__all__ = ["RewardError", "RewardScorer", "check_reward"]

_HOMES = {"RewardError": "workers", "RewardScorer": "scorer", "check_reward": "registry"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
