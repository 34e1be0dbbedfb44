"""Updates of a role in a step: epochs x minibatches x microbatches, for actor and critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megappo.algo.aggregation import Aggregation, token_weights
from megappo.config import Config
from megappo.config.sections.algorithm import AlgorithmSettings
from megappo.config.sections.roles import TrainedRoleSettings
from megappo.errors import RunError
from megappo.megatron.heads import LogprobHead, ValueHead
from megappo.megatron.placed import PlacedBatch
from megappo.megatron.roles import Update
from megappo.megatron.schedule import PackedBatch
from megappo.observe.terminal.progress import PROGRESS
from megappo.ppo.assembly.methods import find_objective
from megappo.ppo.experience import trained_tokens
from megappo.runtime.ranks.exchange import all_gather_varying
from megappo.types import Experience
from megappo_kernels.losses import PolicyInputs, ppo_value_loss
from megappo_kernels.metrics import shown
from megappo_kernels.objectives import PolicyObjective

POSITIVE = "good"
"""Name of the field that marks tokens for the positive-example loss."""


class NonFiniteUpdateError(RunError):
    """A loss or gradient was not finite. The weights are unchanged."""


def draw_minibatches(settings: TrainedRoleSettings, batch_sequences: int, seed: int) -> list[frozenset[int]]:
    """Return the sample ids of each update of a step, in a new order each epoch.

    The result is the same on every rank with the same seed.
    """
    generator, ends = torch.Generator().manual_seed(seed), [0, *accumulate(settings.minibatch_sizes(batch_sequences))]
    orders = [torch.randperm(batch_sequences, generator=generator).tolist() for _ in range(settings.epochs)]
    return [frozenset(order[start:end]) for order in orders for start, end in pairwise(ends)]


@dataclass(frozen=True)
class LossWeights:
    """Inputs of the weight of a token in the loss that do not depend on the sequence of the token."""

    mode: Aggregation
    """Aggregation of token losses (`algorithm.loss_aggregation`)."""
    tokens: int
    """Number of tokens in the loss of the whole minibatch, over all ranks."""
    sequences: int
    """Number of samples with tokens in the loss of the whole minibatch, over all ranks."""
    norm_tokens: int
    """Constant of `seq-mean-token-sum-norm`."""
    nll: float = 0.0
    """Weight of the negative log-likelihood of each token of positive samples.

    The weight is `algorithm.positive_nll_coef` divided by the number of these tokens in the whole minibatch.
    """

    def of(self, batch: PackedBatch, mask_W: Tensor) -> Tensor:
        """Return (W,) float32 weights, 0 where `mask_W` is False."""
        counts = {"total_tokens": self.tokens, "total_sequences": self.sequences, "norm_tokens": self.norm_tokens}
        masks = mask_W.split(batch.response_lengths)
        return torch.cat([token_weights(mask=mask_R[None], mode=self.mode, **counts)[0] for mask_R in masks])

    def inputs(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Return the loss inputs of this rank's rows: the fields of the samples, a bool `mask`, and `weights`."""
        mask_W = (batch.fields_W["mask"] > 0) & (not batch.is_filler)
        whole = {**batch.fields_W, "mask": mask_W, "weights": self.of(batch, mask_W)}
        if POSITIVE in whole:
            whole["nll_weights"] = self.nll * whole.pop(POSITIVE)
        return {name: x_W[batch.own_N] for name, x_W in whole.items()}


@dataclass(frozen=True)
class MinibatchUpdate:
    """One update of a step."""

    number: int
    """Number of the minibatch in the step, from 0."""
    chosen: tuple[int, ...]
    """Positions in the batch of this rank's samples in the update."""
    weights: LossWeights
    update: Update

    @property
    def kl(self) -> float | None:
        """KL(old || new) of the minibatch before the update, in nats per token. None for the critic."""
        total = self.update.sums.get("ppo_kl_k3")
        return None if total is None else total / max(self.update.sums["count"], 1.0)


@dataclass(frozen=True)
class RoleUpdates:
    """Inputs of the updates of a role in a step."""

    batch: PlacedBatch
    config: Config
    fields_BR: dict[str, Tensor]
    """Loss inputs of each of this rank's tokens. `mask` marks the tokens in the loss."""
    make_task: Callable[[LossWeights], PolicyTask | ValueTask]
    stop_above: tuple[str, float] | None = None
    penalty_coef: float = 0.0
    """Weight of KL(old || new) in the loss with `policy_loss: penalty`."""

    def run(self) -> Iterator[MinibatchUpdate]:
        """Run the minibatches, one update at a time. A collective of the world.

        Ends after an update that `stop_above` refuses. After a non-finite update, the role is unchanged until the
        next update is requested. At the end, the weights of the role are complete on every rank, and the role is
        offloaded.
        """
        try:
            yield from self._run()
        finally:
            self.batch.role.rest()

    def _run(self) -> Iterator[MinibatchUpdate]:
        batch = self.batch.with_fields(self.fields_BR)
        ids = batch.samples.sample_ids_B.tolist()
        counts, goods = self._token_counts()
        mode, norm_tokens = self.config.algorithm.loss_aggregation, self.config.rollout.max_response_tokens
        PROGRESS.expect("minibatches", len(batch.minibatches))
        for number, minibatch in enumerate(batch.minibatches):
            PROGRESS.add("minibatches", int(number > 0))  # the previous minibatch is done
            tokens = [counts[i] for i in minibatch if counts[i] > 0]
            if not tokens:
                continue  # every sample was rejected
            good = sum(goods[i] for i in minibatch)
            nll = self.config.algorithm.positive_nll_coef / good if good else 0.0
            weights = LossWeights(mode, sum(tokens), len(tokens), norm_tokens, nll)
            update = batch.update(number, self.make_task(weights), stop_above=self.stop_above)
            chosen = tuple(b for b, sample_id in enumerate(ids) if sample_id in minibatch)
            yield MinibatchUpdate(number, chosen, weights, update)
            if update.finite and not update.applied:
                return

    def local_batch(self, chosen: Sequence[int]) -> dict[str, Any]:
        """Return some of this rank's samples with their fields as tensors and plain values."""
        samples, rows = self.batch.samples, list(chosen)
        return {
            "sample_ids_B": samples.sample_ids_B[rows],
            "sequences": [samples.sequences[b] for b in rows],
            "response_lengths_B": samples.response_lengths_B[rows],
            "routing": None if samples.routing is None else [samples.routing[b] for b in rows],
            "below_minimum": None if samples.below_minimum is None else [samples.below_minimum[b] for b in rows],
            "fields_BR": {name: values_BR[rows] for name, values_BR in self.fields_BR.items()},
        }

    def _token_counts(self) -> list[dict[int, int]]:
        """Return two dictionaries by sample id: number of tokens in the loss, and of such tokens in positive samples.

        The dictionaries contain every sample of the step, on every rank.
        """
        mask_BR = self.fields_BR["mask"]
        good_BR = self.fields_BR.get(POSITIVE, torch.zeros_like(mask_BR))
        columns = [self.batch.samples.sample_ids_B, mask_BR.sum(-1), (good_BR & mask_BR).sum(-1)]
        gathered = all_gather_varying(torch.stack(columns, dim=1).to(self.batch.role.runtime.device))
        ids, *counts = torch.cat(gathered).T.tolist()
        return [dict(zip(ids, of_samples, strict=True)) for of_samples in counts]


def actor_updates(batch: PlacedBatch, experience: Experience, config: Config, penalty_coef: float) -> RoleUpdates:
    """Return the policy updates. `penalty_coef` is the weight of KL(old || new) with `policy_loss: penalty`."""
    scored, algorithm = experience.scored, config.algorithm
    candidates = {
        "old_logprob": scored.old_logprob_BR,
        "advantages": experience.advantages_BR,
        "mask": experience.loss_mask_BR,
        "ref_logprob": scored.ref_logprob_BR,
        "importance_weights": experience.importance_weights_BR,
        POSITIVE: good_tokens(experience, algorithm) if algorithm.positive_nll_coef else None,
    }
    fields_BR = {name: values_BR for name, values_BR in candidates.items() if values_BR is not None}
    make_task = partial(PolicyTask, find_objective(algorithm, penalty_coef))
    stop_above = None if algorithm.target_kl is None else ("ppo_kl_k3", algorithm.target_kl)
    return RoleUpdates(batch, config, fields_BR, make_task, stop_above, penalty_coef)


def good_tokens(experience: Experience, algorithm: AlgorithmSettings) -> Tensor:
    """Return a (B, R) bool mask of the tokens of positive samples (Yue et al. 2025, "VAPO", section 4.3).

    The loss increases the likelihood of these tokens.
    """
    scored = experience.scored
    good_B = scored.rollouts.total_rewards_B(scored.scores_B) > algorithm.positive_nll_above
    return good_B[:, None] & experience.loss_mask_BR


def critic_updates(batch: PlacedBatch, experience: Experience, config: Config) -> RoleUpdates:
    """Return the updates of the value model."""
    scored = experience.scored
    assert config.critic is not None and scored.values_BR is not None
    fields_BR = {
        "old_values": scored.values_BR,
        "returns": experience.returns_BR,
        "mask": trained_tokens(scored.rollouts, config.algorithm),
    }
    return RoleUpdates(batch, config, fields_BR, partial(ValueTask, config.critic.value_clip))


@dataclass(frozen=True)
class PolicyTask:
    """Task of the actor in an update. The output layer computes the policy loss in the same pass."""

    objective: PolicyObjective
    weights: LossWeights

    def __call__(
        self, head: LogprobHead, hidden_t1H: Tensor, batch: PackedBatch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss and its metrics."""
        sequences_N = batch.sequences_N if self.objective.sees_sequences else None
        inputs = PolicyInputs(**self.weights.inputs(batch), sequences=sequences_N)
        return head(hidden_t1H, batch, inputs, self.objective)


@dataclass(frozen=True)
class ValueTask:
    """Task of the critic in an update: the value loss of the output."""

    value_clip: float | None
    weights: LossWeights

    def __call__(self, head: ValueHead, hidden_t1H: Tensor, batch: PackedBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss and its metrics."""
        values_N, _ = head(hidden_t1H, batch)
        result = ppo_value_loss(values=values_N, value_clip=self.value_clip, **self.weights.inputs(batch))
        return result.loss, result.metrics


def step_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Return metrics of all updates of one role in a step.

    Means per token cover all minibatches. Losses, norms and counts cover updates.
    """
    applied = [u for u in updates if u.applied]
    numbers = {"updates": float(len(applied)), "skipped_updates": float(sum(not u.finite for u in updates))}
    if not updates:
        return numbers
    numbers["learning_rate"] = updates[-1].learning_rate
    if applied:
        numbers["grad_norm"] = sum(u.grad_norm for u in applied) / len(applied)
    uneven = [u.router_aux_loss for u in updates if u.router_aux_loss is not None]
    if uneven:
        numbers["router_aux_loss"] = sum(uneven) / len(uneven)
    return numbers | shown([u.sums for u in updates])
