"""Conversion of scores into update inputs: KL in the reward, advantages, whitening, mismatch correction.

Each rank processes its own samples. Ranks exchange only statistics. B samples of this rank, R longest response.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.algo.controllers import AdaptiveKLController, FixedKLController
from megappo.algo.correction import importance_weights
from megappo.algo.groups import Groups
from megappo.algo.kl import apply_kl_to_rewards, on_last_tokens
from megappo.config.sections.algorithm import AlgorithmSettings
from megappo.ppo.assembly.methods import find_estimator, lambdas
from megappo.ppo.reports.critic_gauges import critic_metrics, tally_values
from megappo.runtime.ranks.tally import Tally
from megappo.types import Experience, Rollouts, Scored
from megappo_kernels.gae import gae
from megappo_kernels.objectives import kl_estimate
from megappo_kernels.whiten import masked_whiten, masked_whiten_stats, merge_whiten_stats


def trained_tokens(rollouts: Rollouts, algorithm: AlgorithmSettings) -> Tensor:
    """Return a (B, R) bool mask of response tokens in the losses, before corrections reject tokens."""
    mask_BR = rollouts.response_mask_BR
    return mask_BR & ~rollouts.truncated_B[:, None] if algorithm.mask_truncated else mask_BR


def turn_ends(rollouts: Rollouts) -> Tensor:
    """Return a (B, R) bool mask of the last token of each turn. Without an environment, a response is one turn."""
    if rollouts.episodes is None:
        return on_last_tokens(torch.ones(len(rollouts.response_mask_BR)), rollouts.response_mask_BR) > 0
    ends_BR = torch.zeros_like(rollouts.response_mask_BR)
    for ends_R, episode in zip(ends_BR, rollouts.episodes.of_samples, strict=True):
        ends_R[[turn.stop - 1 for turn in episode.turns]] = True
    return ends_BR


def groups_differ_G(rewards: Tensor, group_ids_B: Tensor) -> Tensor:
    """Return (G,) bool: True if the rewards of a group differ by more than the rounding error.

    `rewards`: (B,), or (B, N) parts of the reward of a sample. Failed episodes have negative group ids and belong to
    no group.
    """
    whole_B = group_ids_B >= 0
    differ_B = Groups.of(rewards[whole_B], group_ids_B[whole_B]).differ_B
    ids_G, group_B = group_ids_B[whole_B].unique(return_inverse=True)
    return torch.zeros(len(ids_G), dtype=torch.bool).scatter(0, group_B, differ_B)


class ExperienceMaker:
    """Converts Scored into Experience, and stores the state of the adaptive KL controller."""

    def __init__(self, algorithm: AlgorithmSettings, device: torch.device) -> None:
        self._algorithm, self._device = algorithm, device
        self._estimator = find_estimator(algorithm)
        kl = algorithm.kl_in_reward
        self.kl_controller: FixedKLController
        if kl is not None and kl.controller == "adaptive":
            self.kl_controller = AdaptiveKLController(kl.coef, kl.target_nats, kl.horizon)
        else:
            self.kl_controller = FixedKLController(kl.coef if kl is not None else 0.0)

    def make(
        self, scored: Scored, step_sequences: int, rewards_BR: Tensor | None = None
    ) -> tuple[Experience, dict[str, float]]:
        """Return the experience of the step and its metrics. A collective of the world.

        Args:
            scored: this rank's samples.
            step_sequences: number of samples in the step over all ranks, for the adaptive controller.
            rewards_BR: known token rewards. By default, scores and KL determine the token rewards.
        """
        tally, mask_BR, kl_BR = Tally(), scored.rollouts.response_mask_BR, None
        if rewards_BR is None:
            rewards_BR, kl_BR = self._rewards(scored, tally)
        advantages_BR, returns_BR = self._estimator(
            rewards=rewards_BR,
            values=scored.values_BR,
            mask=mask_BR,
            group_ids=scored.rollouts.group_ids_B,
            gamma=self._algorithm.gamma,
            **lambdas(self._algorithm, mask_BR),
            gae=partial(self._gae, borders=self._borders(scored.rollouts)),
        )
        tally.mean_and_std("raw", advantages_BR, mask_BR)
        if self._algorithm.whiten_advantages and self._estimator.whitens:
            advantages_BR = masked_whiten(advantages_BR, mask_BR, self._global_stats(advantages_BR, mask_BR))
        weights_BR, loss_mask_BR = self._correction(scored, tally)
        trained_BR = trained_tokens(scored.rollouts, self._algorithm)
        loss_mask_BR = loss_mask_BR & trained_BR
        tally.mean_and_std("advantage", advantages_BR, mask_BR)
        tally.mean("return/mean", returns_BR, mask_BR)
        if scored.values_BR is not None:
            tally_values(tally, scored.values_BR, self.returns_to_go(rewards_BR, scored.rollouts), trained_BR)
        self._tally_rewards(scored, tally)
        numbers = critic_metrics(tally.reduce(self._device))
        if "raw/std" in numbers:
            del numbers["raw/mean"]
            numbers["advantage/std_raw"] = numbers.pop("raw/std")
        if "kl/mean" in numbers:
            numbers["kl/coef"] = self.kl_controller.value
            settings = self._algorithm.kl_in_reward
            per_response = settings is not None and settings.per == "response"
            self.kl_controller.update(numbers["kl/per_response" if per_response else "kl/mean"], step_sequences)
        experience = Experience(scored, advantages_BR, returns_BR, weights_BR, loss_mask_BR, rewards_BR, kl_BR)
        return experience, numbers

    def returns_to_go(self, rewards_BR: Tensor, rollouts: Rollouts) -> Tensor:
        """Return (B, R): the discounted sum of rewards from each response token on (lambda 1, no values)."""
        nothing_BR, mask_BR = torch.zeros_like(rewards_BR), rollouts.response_mask_BR
        borders_BR, gamma = self._borders(rollouts), self._algorithm.gamma
        return self._gae(rewards_BR, nothing_BR, mask_BR, gamma=gamma, lam=1.0, borders=borders_BR)[1]

    def _borders(self, rollouts: Rollouts) -> Tensor | None:
        return turn_ends(rollouts) if self._algorithm.discount_at == "turn" else None

    def _tally_rewards(self, scored: Scored, tally: Tally) -> None:
        total_rewards_B, scored_B = scored.rollouts.total_rewards_B(scored.scores_B), scored.rollouts.scored_B
        tally.mean_and_std("reward", total_rewards_B, scored_B)
        if self._estimator.compares_samples:
            parts_BN = scored.rollouts.reward_parts_BN(scored.scores_B)
            tally.mean("reward/group_spread", groups_differ_G(parts_BN, scored.rollouts.group_ids_B))
        tally.maximum("reward/max", total_rewards_B, scored_B)
        tally.minimum("reward/min", total_rewards_B, scored_B)

    def _rewards(self, scored: Scored, tally: Tally) -> tuple[Tensor, Tensor | None]:
        """Return token rewards (B, R), and the KL per token with a reference.

        The score is on the last token. The weighted KL is subtracted from every token. An environment's reward for a
        turn is on the last token of the turn.
        """
        mask_BR, episodes, scores = scored.rollouts.response_mask_BR, scored.rollouts.episodes, scored.scores_B
        if episodes is not None:
            scores = episodes.turn_rewards_BR + on_last_tokens(scores, mask_BR)
        kl = torch.zeros_like(scored.old_logprob_BR)
        if scored.ref_logprob_BR is not None:
            settings = self._algorithm.kl_in_reward
            kind = settings.kind if settings is not None else "kl"
            kl = kl_estimate(scored.old_logprob_BR - scored.ref_logprob_BR, kind)
            kl = torch.where(mask_BR, kl, 0.0)
            tally.mean("kl/mean", kl, mask_BR)
            tally.mean("kl/per_response", kl.sum(-1), scored.rollouts.scored_B)
        rewards_BR = apply_kl_to_rewards(scores=scores, kl=kl, mask=mask_BR, coef=self.kl_controller.value)
        return rewards_BR, None if scored.ref_logprob_BR is None else kl

    def _gae(
        self,
        rewards: Tensor,
        values: Tensor,
        mask: Tensor,
        *,
        gamma: float,
        lam: float | Tensor,
        borders: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute GAE on the device of the run."""
        on_device = (x.to(self._device) for x in (rewards, values, mask))
        lam = lam.to(self._device) if isinstance(lam, Tensor) else lam
        borders = None if borders is None else borders.to(self._device)
        advantages_BR, returns_BR = gae(*on_device, gamma=gamma, lam=lam, borders=borders)
        return advantages_BR.to(rewards.device), returns_BR.to(rewards.device)

    def _global_stats(self, values_BR: Tensor, mask_BR: Tensor) -> Tensor:
        """Return whitening statistics over the samples of all ranks.

        The statistics are merged in rank order, so that the result is the same on each rank.
        """
        local_3 = masked_whiten_stats(values_BR.to(self._device), mask_BR.to(self._device))
        gathered = [torch.empty_like(local_3) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, local_3)
        return merge_whiten_stats(torch.stack(gathered)).to(values_BR.device)

    def _correction(self, scored: Scored, tally: Tally) -> tuple[Tensor | None, Tensor]:
        """Return importance weights for the mismatch of the engine, and the mask of tokens in the loss.

        The weights are None without correction.
        """
        mask_BR = scored.rollouts.response_mask_BR
        if self._algorithm.old_logprob != "corrected":
            return None, mask_BR
        settings = self._algorithm.correction
        weights_BR, keep_BR = importance_weights(
            old_logprob=scored.old_logprob_BR,
            engine_logprob=scored.rollouts.engine_logprob_BR,
            mask=mask_BR,
            level=settings.level,
            cap=settings.cap,
            reject_above=settings.reject_above,
            reject_below=settings.reject_below,
        )
        tally.mean("correction/weight_mean", weights_BR, mask_BR)
        tally.mean("correction/truncated", (weights_BR >= settings.cap).float(), mask_BR)
        tally.mean("correction/rejected", (~keep_BR).float(), mask_BR)
        return weights_BR, keep_BR
