"""Scores of a step's responses, whatever they come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megappo.config.schema import RewardSettings
from megappo.rewards.registry import check_reward
from megappo.rewards.workers import RewardPool, RewardRequest, RewardResult, too_many_failures
from megappo.types import CHAT_MESSAGES, Rollouts

if TYPE_CHECKING:
    from megappo.rewards.model import RewardModel


class RewardScorer:
    """Applies the configured reward; every rank scores its own responses."""

    def __init__(self, settings: RewardSettings, device: torch.device) -> None:
        """Start workers or load the model. Raises ValueError for a function or model that cannot be used."""
        check_reward(settings)
        self._settings, self._device = settings, device
        self._pool: RewardPool | None = None
        self._model: RewardModel | None = None
        if settings.model_path is not None:
            from megappo.rewards.model import RewardModel

            dtype = getattr(torch, settings.model_dtype(on_cuda=device.type == "cuda"))
            self._model = RewardModel(settings.model_path, dtype=dtype, device=device)
        else:
            self._pool = RewardPool(settings)

    def score(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, float]]:
        """Scores (B,) float32 of this rank, and `reward/failures` and `reward/timeouts` over all ranks.

        A collective of the whole world. Raises RewardError on every rank where too many failed over all of them, so
        that none waits for one that has stopped.
        """
        from megappo.runtime.tally import Tally

        result = self._model_result(rollouts) if self._pool is None else self._pool.run(_requests(rollouts))
        B = len(result.scores)
        tally = Tally()
        tally.mean("reward/failures", torch.arange(B) < len(result.failures))
        tally.mean("reward/timeouts", torch.arange(B) < result.timeouts)
        tally.total("failed", len(result.failures))
        tally.total("samples", B)
        metrics = tally.reduce(None, self._device)
        failed, samples = int(metrics.pop("failed")), int(metrics.pop("samples"))
        if failed > self._settings.max_failure_fraction * samples:
            raise too_many_failures(self._settings, failed, samples, result.failures)
        return result.scores, metrics

    def score_local(self, rollouts: Rollouts) -> Tensor:
        """Scores (B,) float32 of this rank, without any collective. Raises RewardError where too many failed."""
        result = self._model_result(rollouts) if self._pool is None else self._pool.score(_requests(rollouts))
        return result.scores

    def _model_result(self, rollouts: Rollouts) -> RewardResult:
        """Prompts go as chat messages to a reward model that has a template for them."""
        assert self._model is not None
        chat = self._model.has_chat_template
        prompts = [p.metadata.get(CHAT_MESSAGES, p.text) if chat else p.text for p in rollouts.prompts]
        return RewardResult(self._model.score(prompts, rollouts.responses), [])

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()


def _requests(rollouts: Rollouts) -> list[RewardRequest]:
    return [
        RewardRequest(prompt.text, response, raw_response, prompt.answer, prompt.metadata)
        for prompt, response, raw_response in zip(
            rollouts.prompts, rollouts.responses, rollouts.raw_responses, strict=True
        )
    ]
