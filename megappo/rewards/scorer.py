"""Scores of a step's responses, whatever they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megappo.config.schema import RewardSettings
from megappo.rewards.registry import OF_ENVIRONMENT, check_reward
from megappo.rewards.workers import RewardPool, RewardRequest, RewardResult, too_many_failures
from megappo.types import CHAT_MESSAGES, Rollouts

if TYPE_CHECKING:
    from megappo.rewards.model import RewardModel


class RewardScorer:
    """Applies the configured rewards; every rank scores its own responses."""

    def __init__(self, settings: RewardSettings, device: torch.device) -> None:
        """Start workers or load the model. Raises ValueError for a function or model that cannot be used."""
        for _, term in settings.terms.values():
            check_reward(term)
        self._settings, self._device = settings, device
        self._pools: dict[str, RewardPool] = {}
        """By the names of `RewardSettings.terms`."""
        self._model: RewardModel | None = None
        if settings.model_path is not None:
            from megappo.rewards.model import RewardModel

            dtype = getattr(torch, settings.model_dtype(on_cuda=device.type == "cuda"))
            self._model = RewardModel(settings.model_path, dtype=dtype, device=device)
        elif settings.function != OF_ENVIRONMENT:
            try:
                for name, (_, term) in settings.terms.items():
                    self._pools[name] = RewardPool(term)
            except (ValueError, RuntimeError, OSError):
                self.close()
                raise

    def score(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, float]]:
        """Scores (B,) float32 of this rank, and `reward/failures`, `reward/timeouts` and the mean of each of several
        functions over all ranks.

        A collective of the whole world. Raises RewardError on every rank where too many failed over all of them, so
        that none waits for one that has stopped.
        """
        from megappo.runtime.tally import Tally

        result, of_terms = self._result(rollouts, most_failures=float("inf"))
        B = len(result.scores)
        tally = Tally()
        tally.mean("reward/failures", torch.arange(B) < len(result.failures))
        tally.mean("reward/timeouts", torch.arange(B) < result.timeouts)
        for name, scores_B in of_terms.items():
            tally.mean(f"reward/{name}", scores_B)
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
        result, _ = self._result(rollouts, most_failures)
        if len(result.failures) > most_failures:
            raise too_many_failures(self._settings, len(result.failures), len(result.scores), result.failures)
        return result.scores

    def _result(self, rollouts: Rollouts, most_failures: float) -> tuple[RewardResult, dict[str, Tensor]]:
        """Of all samples, and the scores by each of several functions. No function sees those of failed episodes, which
        have the score of a failure."""
        if rollouts.episodes is None:
            return self._scored(rollouts, range(len(rollouts.responses)), most_failures)
        failed_B = rollouts.episodes.failed_B
        whole = (~failed_B).nonzero()[:, 0].tolist()
        result, of_terms = self._scored(rollouts, whole, most_failures)

        def with_failed(scores: Tensor) -> Tensor:
            scores_B = torch.full(failed_B.shape, self._settings.failure_score, dtype=torch.float32)
            scores_B[whole] = scores
            return scores_B

        failures = [(whole[i], reason) for i, reason in result.failures]
        every = {name: with_failed(scores) for name, scores in of_terms.items()}
        late = frozenset(whole[i] for i in result.late)
        return RewardResult(with_failed(result.scores), failures, late), every

    def _scored(
        self, rollouts: Rollouts, chosen: Sequence[int], most_failures: float
    ) -> tuple[RewardResult, dict[str, Tensor]]:
        """Of some samples, in the order of `chosen`."""
        if self._pools:
            requests = [_request(rollouts, b) for b in chosen]
            found = {name: pool.run(requests, most_failures=most_failures) for name, pool in self._pools.items()}
            return self._sum(found), {name: result.scores for name, result in found.items() if name}
        if self._model is None:
            return RewardResult(torch.zeros(len(chosen)), []), {}
        chat = self._model.has_chat_template  # then prompts go to it as messages
        prompts = [p.metadata.get(CHAT_MESSAGES, p.text) if chat else p.text for p in rollouts.prompts]
        given = [(prompts[b], rollouts.responses[b]) for b in chosen]
        return RewardResult(self._model.score([p for p, _ in given], [r for _, r in given]), []), {}

    def _sum(self, found: dict[str, RewardResult]) -> RewardResult:
        """The weighted sum; a sample that failed with any function has the score of a failure."""
        if "" in found:
            return found[""]
        weights = {name: weight for name, (weight, _) in self._settings.terms.items()}
        total = torch.stack([weights[name] * result.scores for name, result in found.items()]).sum(0)
        failures = {i: f"{name}: {reason}" for name, result in found.items() for i, reason in result.failures}
        late = {i for result in found.values() for i in result.late}
        for i in failures:
            total[i] = self._settings.failure_score
        return RewardResult(total, sorted(failures.items()), frozenset(late))

    def close(self) -> None:
        """End the workers."""
        for pool in self._pools.values():
            pool.close()


def _request(rollouts: Rollouts, b: int) -> RewardRequest:
    prompt, length = rollouts.prompts[b], int(rollouts.response_lengths_B[b])
    ids = rollouts.sequences[b].tolist()
    return RewardRequest(
        prompt.text,
        rollouts.responses[b],
        rollouts.raw_responses[b],
        prompt.answer,
        prompt.metadata,
        prompt_token_ids=ids[: len(ids) - length],
        token_ids=ids[len(ids) - length :],
        truncated=bool(rollouts.truncated_B[b]),
        conversation=_conversation(rollouts, b),
    )


def _conversation(rollouts: Rollouts, b: int) -> list[dict[str, Any]]:
    """The prompt's messages, and who said what after them."""
    prompt = rollouts.prompts[b]
    begun = list(prompt.metadata.get(CHAT_MESSAGES, [{"role": "user", "content": prompt.text}]))
    if rollouts.episodes is None:
        return [*begun, {"role": "assistant", "content": rollouts.responses[b]}]
    roles = {"model": "assistant", "environment": "environment"}
    said = rollouts.episodes.conversations[b]
    return [*begun, *({"role": roles[turn["by"]], "content": turn["text"]} for turn in said)]
