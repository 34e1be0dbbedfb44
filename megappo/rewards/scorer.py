"""Scores of a step's responses, whatever they come from."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.config.schema import RewardSettings
from megappo.rewards.workers import RewardPool, RewardRequest, RewardResult
from megappo.runtime.tally import Tally
from megappo.types import Rollouts


class RewardScorer:
    """Applies the configured reward; every rank scores its own responses."""

    def __init__(self, settings: RewardSettings, device: torch.device) -> None:
        """Start workers or load the model. Raises ValueError for a function or model that cannot be used."""
        self._device = device
        self._pool: RewardPool | None = None
        self._model = None
        if settings.model_path is not None:
            from megappo.rewards.model import RewardModel

            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            self._model = RewardModel(settings.model_path, dtype=dtype, device=device)
        else:
            self._pool = RewardPool(settings)

    def score(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, float]]:
        """Scores (B,) float32 of this rank, and `reward/failures` and `reward/timeouts` over all ranks.

        A collective of the whole world. Raises RewardError where too many failed.
        """
        result = self._apply(rollouts)
        B = len(result.scores_B)
        tally = Tally()
        tally.mean("reward/failures", torch.arange(B) < len(result.failures))
        tally.mean("reward/timeouts", torch.arange(B) < result.timeouts)
        return result.scores_B, tally.reduce(None, self._device)

    def score_local(self, rollouts: Rollouts) -> Tensor:
        """Scores (B,) float32 of this rank, without any collective."""
        return self._apply(rollouts).scores_B

    def _apply(self, rollouts: Rollouts) -> RewardResult:
        if self._model is not None:
            return RewardResult(self._model.score([p.text for p in rollouts.prompts], rollouts.responses), [])
        assert self._pool is not None
        return self._pool.score(
            [
                RewardRequest(prompt.text, response, prompt.answer, prompt.metadata)
                for prompt, response in zip(rollouts.prompts, rollouts.responses, strict=True)
            ]
        )

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()
