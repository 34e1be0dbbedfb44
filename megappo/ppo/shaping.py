"""Reward shaping for training: penalties for long or truncated responses, scaling, normalisation, bounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megappo.algo.overlong import overlong_penalty
from megappo.config import Config
from megappo.runtime.ranks.tally import Tally
from megappo.types import Rollouts
from megappo_kernels.whiten import rounding_of, without_rounding


class RewardShaper:
    """Computes the training scores. The state is the same on every rank."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config, self._device = config, device
        self._count, self._mean, self._squares = 0.0, 0.0, 0.0
        """Count, mean and sum of squared deviations of all scores so far, before `reward.normalize`."""

    def state_dict(self) -> list[float]:
        """Return the state of `reward.normalize` as JSON types."""
        return [self._count, self._mean, self._squares]

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Restore the result of `state_dict`. Empty for a run that did not normalize."""
        if state:
            self._count, self._mean, self._squares = state

    def shape(self, scores_B: Tensor, rollouts: Rollouts) -> tuple[Tensor, dict[str, float]]:
        """Return this rank's training scores (B,) float32, and shaping metrics over all ranks. A collective of the
        world.

        The settings enable these operations, in this order. `reward.truncated_score` replaces the score of a response
        that ended at a limit of the whole response (ORZ). `reward.truncated_penalty` is subtracted from such a score
        (as in TRL). `reward.overlong` adds the penalty of DAPO. `reward.normalize` uses all scores so far, including
        this step. The last operation is clip(scale * score + shift).
        """
        reward, unshaped_B, tally = self._config.reward, scores_B, Tally()
        if not reward.is_shaped:
            return scores_B, {}
        scores_B = self._punished(scores_B, rollouts, tally)
        if reward.normalize is not None:
            scores_B = self._normalized(scores_B, rollouts.scored_B)
        scores_B = reward.scale * scores_B + reward.shift
        if reward.clip is not None:
            low, high = reward.clip
            tally.mean("reward/clipped", (scores_B < low) | (scores_B > high), rollouts.scored_B)
            scores_B = scores_B.clamp(low, high)
        tally.mean("reward/given", unshaped_B, rollouts.scored_B)
        return scores_B, tally.reduce(self._device) | self._running()

    def _punished(self, scores_B: Tensor, rollouts: Rollouts, tally: Tally) -> Tensor:
        reward = self._config.reward
        if reward.truncated_score is not None:
            scores_B = torch.where(rollouts.truncated_B, reward.truncated_score, scores_B)
        scores_B = scores_B - reward.truncated_penalty * rollouts.truncated_B
        if reward.overlong is not None:
            most, buffer = self._config.rollout.max_response_tokens, reward.overlong.buffer_tokens
            penalty_B = overlong_penalty(rollouts.response_lengths_B, most_tokens=most, buffer_tokens=buffer)
            penalty_B = reward.overlong.penalty * penalty_B
            tally.mean("reward/overlong", penalty_B, rollouts.scored_B)
            scores_B = scores_B + penalty_B
        return scores_B

    def _normalized(self, scores_B: Tensor, scored_B: Tensor) -> Tensor:
        """Divide scores by the unbiased running standard deviation. `mean_std` first subtracts the running mean.

        TRL and PPO for games use the same normalisation. If all scores are equal except for rounding errors, the
        scores are not divided. Failed episodes do not count.
        """
        batch = Tally()
        batch.total("count", float(scored_B.sum()))
        batch.mean_and_std("scores", scores_B, scored_B)
        numbers = batch.reduce(self._device)
        if numbers["count"]:
            self._add(numbers["count"], numbers["scores/mean"], numbers["scores/std"])
        mean, std = torch.tensor([self._mean, self._std], dtype=torch.float64)
        rounding = rounding_of(torch.hypot(mean, std), scores_B.dtype)
        # float64, because the rounding error of a large mean can be larger than the spread of the scores
        wide_B = scores_B.double()
        if self._config.reward.normalize == "mean_std":
            wide_B = without_rounding(wide_B - mean, std, rounding)
        return (wide_B / std.where(std > rounding, 1.0)).to(scores_B.dtype)

    def _add(self, count: float, mean: float, std: float) -> None:
        """Merge the statistics of a step into the running statistics (Chan et al. 1979)."""
        total, apart = self._count + count, mean - self._mean
        self._squares += count * std**2 + apart**2 * self._count * count / total
        self._mean += apart * count / total
        self._count = total

    @property
    def _std(self) -> float:
        return (self._squares / (self._count - 1.0)) ** 0.5 if self._count > 1.0 else 0.0

    def _running(self) -> dict[str, float]:
        if self._config.reward.normalize is None:
            return {}
        return {"reward/running_mean": self._mean, "reward/running_std": self._std}
