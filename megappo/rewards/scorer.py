"""Scores of a step's responses, whatever they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megappo.config.schema import RewardSettings
from megappo.rewards.registry import OF_ENVIRONMENT, check_reward
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
        elif settings.function != OF_ENVIRONMENT:
            self._pool = RewardPool(settings)

    def score(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, float]]:
        """Scores (B,) float32 of this rank, and `reward/failures` and `reward/timeouts` over all ranks.

        A collective of the whole world. Raises RewardError on every rank where too many failed over all of them, so
        that none waits for one that has stopped.
        """
        from megappo.runtime.tally import Tally

        result = self._result(rollouts, most_failures=float("inf"))
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
        most_failures = self._settings.max_failure_fraction * len(rollouts.responses)
        result = self._result(rollouts, most_failures)
        if len(result.failures) > most_failures:
            raise too_many_failures(self._settings, len(result.failures), len(result.scores), result.failures)
        return result.scores

    def _result(self, rollouts: Rollouts, most_failures: float) -> RewardResult:
        """Of all samples. No function sees those of failed episodes, which have the score of a failure."""
        if rollouts.episodes is None:
            return self._scored(rollouts, range(len(rollouts.responses)), most_failures)
        failed_B = rollouts.episodes.failed_B
        scores_B = torch.full(failed_B.shape, self._settings.failure_score, dtype=torch.float32)
        whole = (~failed_B).nonzero()[:, 0].tolist()
        result = self._scored(rollouts, whole, most_failures)
        scores_B[whole] = result.scores
        return RewardResult(scores_B, [(whole[i], reason) for i, reason in result.failures])

    def _scored(self, rollouts: Rollouts, chosen: Sequence[int], most_failures: float) -> RewardResult:
        """Of some samples, in the order of `chosen`."""
        if self._pool is not None:
            return self._pool.run([_request(rollouts, b) for b in chosen], most_failures=most_failures)
        if self._model is None:
            return RewardResult(torch.zeros(len(chosen)), [])
        chat = self._model.has_chat_template  # then prompts go to it as messages
        prompts = [p.metadata.get(CHAT_MESSAGES, p.text) if chat else p.text for p in rollouts.prompts]
        given = [(prompts[b], rollouts.responses[b]) for b in chosen]
        return RewardResult(self._model.score([p for p, _ in given], [r for _, r in given]), [])

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()


def _request(rollouts: Rollouts, b: int) -> RewardRequest:
    prompt = rollouts.prompts[b]
    return RewardRequest(prompt.text, rollouts.responses[b], rollouts.raw_responses[b], prompt.answer, prompt.metadata)
