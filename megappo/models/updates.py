"""The updates of a step: epochs x minibatches x microbatches, for actor and critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.algo import token_weights
from megappo.config.algorithm import AlgorithmSettings
from megappo.config.roles import CriticSettings, TrainedRoleSettings
from megappo.models.heads import PolicyTarget
from megappo.models.jumps import Jump, describe_samples
from megappo.models.roles import NonFiniteUpdateError, TrainedRole, Update, combine_metrics
from megappo.models.schedule import PackedBatch, Task
from megappo.models.scoring import response_rows
from megappo.progress import PROGRESS
from megappo.runtime.exchange import Row, all_gather_varying
from megappo.types import Experience
from megappo_kernels import POLICY_METRICS, PolicyInputs, PolicyObjective, value_loss

_VALUE_FIELDS = ("old_values", "returns", "weights", "mask")
# Already weighted by the global minibatch: their sum over microbatches is the number to show.
_WEIGHTED = frozenset({"loss", "pg_loss", "kl_loss", "entropy_loss"})
_EQUAL_RETURNS = 1e-6
"""Returns whose spread is below this share of their size differ by rounding only."""


@dataclass
class UpdateSummary:
    """Metrics of all updates of one role in one step."""

    updates: list[Update] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Means per token over all minibatches; losses, norms and counts over updates."""
        applied = [u for u in self.updates if u.applied]
        count = sum(u.sums["count"] for u in self.updates)
        numbers = {
            "updates": float(len(applied)),
            "skipped_updates": float(sum(not u.finite for u in self.updates)),
        }
        if not self.updates:
            return numbers
        numbers["learning_rate"] = self.updates[-1].learning_rate
        if applied:
            numbers["grad_norm"] = sum(u.grad_norm for u in applied) / len(applied)
        names = self.updates[0].sums
        parts = {name: torch.tensor([u.sums[name] for u in self.updates], dtype=torch.float64) for name in names}
        combined = {name: float(value) for name, value in combine_metrics(parts).items()}
        spreads = {name: combined.pop(name) for name in names if name.endswith(("_mean", "_m2"))}
        for name, value in combined.items():
            if name.endswith("_max"):
                numbers[name] = value
            elif name in _WEIGHTED:
                numbers[name] = value / len(self.updates)
            elif name != "count" and count:
                numbers[name] = value / count
        if spreads and count:
            numbers["value_mean"] = numbers.pop("value")
            numbers["explained_variance"] = _explained_variance(spreads, count)
        return numbers


def _explained_variance(spreads: Mapping[str, float], count: float) -> float:
    """1 - Var(R - v) / Var(R); NaN where all returns are equal, up to the last bits of float32."""
    variance = spreads["return_m2"] / count
    if variance <= _EQUAL_RETURNS**2 * max(1.0, spreads["return_mean"] ** 2):
        return float("nan")
    return 1 - spreads["error_m2"] / spreads["return_m2"]


@dataclass(frozen=True)
class MinibatchPlan:
    """Which samples make which update; the same on every rank."""

    batch_sequences: int
    minibatch_sequences: int
    epochs: int
    seed: int
    """Changes with run seed, step and role."""

    def __len__(self) -> int:
        """Minibatches of all epochs."""
        return self.epochs * -(-self.batch_sequences // self.minibatch_sequences)

    def __iter__(self) -> Iterator[frozenset[int]]:
        """Sample ids of one minibatch after the other, a new order each epoch."""
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.epochs):
            order = torch.randperm(self.batch_sequences, generator=generator).tolist()
            for start in range(0, self.batch_sequences, self.minibatch_sequences):
                yield frozenset(order[start : start + self.minibatch_sequences])


@dataclass(frozen=True)
class _Work:
    """What a role's updates are made of."""

    names: tuple[str, ...]
    """Fields that travel with each sample, in this order."""
    fields_BR: dict[str, Tensor]
    """All of them but the weights, which differ between minibatches."""
    mask_BR: Tensor
    """Tokens the loss counts."""
    task: Task
    stop_above: tuple[str, float] | None = None

    def stacked(self, weights_BR: Tensor) -> Tensor:
        """(F, B, R) float32."""
        fields_BR = {**self.fields_BR, "weights": weights_BR}
        return torch.stack([fields_BR[name].float() for name in self.names])


@dataclass(frozen=True)
class RefusedUpdate:
    """A minibatch whose loss or gradient was not finite; the role's weights are those it met."""

    role: str
    number: int
    """Minibatches of the step before it."""
    rows: Sequence[Row]
    """This rank's samples."""
    task: Task
    update: Update | None
    """What came of it; None on ranks outside the role."""

    @property
    def names(self) -> tuple[str, ...]:
        """Fields of the rows, in order."""
        return self.task.names if isinstance(self.task, _PolicyTask) else _VALUE_FIELDS

    @property
    def penalty_coef(self) -> float:
        """Weight of KL(old || new) in the loss; 0 for the critic."""
        return self.task.objective.penalty_coef if isinstance(self.task, _PolicyTask) else 0.0


def task_again(
    role: str, names: Sequence[str], penalty_coef: float, algorithm: AlgorithmSettings, critic: CriticSettings | None
) -> Task:
    """The task of a refused update, from what was kept of it."""
    if role == "actor":
        return _PolicyTask(tuple(names), _policy_objective(algorithm, penalty_coef))
    assert critic is not None
    return _ValueTask(critic.value_clip)


def minibatch_plan(settings: TrainedRoleSettings, batch_sequences: int, seed: int) -> MinibatchPlan:
    """The plan of one role for one step."""
    return MinibatchPlan(batch_sequences, settings.minibatch_sequences, settings.epochs, seed)


def update_actor(
    actor: TrainedRole,
    experience: Experience,
    plan: MinibatchPlan,
    algorithm: AlgorithmSettings,
    *,
    penalty_coef: float,
    norm_tokens: int,
) -> dict[str, float]:
    """All updates of the policy in a step; returns `actor/*` on every rank. A collective of the whole world.

    Args:
        penalty_coef: weight of KL(old || new) with `policy_loss: penalty`.
        norm_tokens: the constant of `seq-mean-token-sum-norm`.

    Raises NonFiniteUpdateError with `on_nonfinite: stop`.
    """
    scored = experience.scored
    given = {
        "old_logprob": scored.old_logprob_BR,
        "advantages": experience.advantages_BR,
        "mask": experience.loss_mask_BR,
        "ref_logprob": scored.ref_logprob_BR,
        "importance_weights": experience.importance_weights_BR,
    }
    fields = {name: values for name, values in given.items() if values is not None}
    task = _PolicyTask((*fields, "weights"), _policy_objective(algorithm, penalty_coef))
    stop_above = None if algorithm.target_kl is None else ("ppo_kl_k3", algorithm.target_kl)
    work = _Work(task.names, fields, experience.loss_mask_BR, task, stop_above)
    return _run(actor, experience, plan, work, algorithm, norm_tokens)


def update_critic(
    critic: TrainedRole,
    experience: Experience,
    plan: MinibatchPlan,
    settings: CriticSettings,
    algorithm: AlgorithmSettings,
    *,
    norm_tokens: int,
) -> dict[str, float]:
    """All updates of the value model in a step; returns `critic/*` on every rank. A collective of the whole world."""
    mask_BR = experience.scored.rollouts.response_mask_BR
    values_BR = experience.scored.values_BR
    assert values_BR is not None
    fields = {"old_values": values_BR, "returns": experience.returns_BR, "mask": mask_BR}
    work = _Work(_VALUE_FIELDS, fields, mask_BR, _ValueTask(settings.value_clip))
    return _run(critic, experience, plan, work, algorithm, norm_tokens)


def _policy_objective(algorithm: AlgorithmSettings, penalty_coef: float) -> PolicyObjective:
    kl = algorithm.kl_in_loss
    return PolicyObjective(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        kind=algorithm.policy_loss,
        penalty_coef=penalty_coef,
        entropy_coef=algorithm.entropy_coef,
        kl_kind=kl.kind if kl else "low_var_kl",
        kl_coef=kl.coef if kl else 0.0,
    )


@dataclass(frozen=True)
class _PolicyTask:
    """The output layer computes the policy loss itself."""

    names: tuple[str, ...]
    objective: PolicyObjective

    def expect(self, head: Any, batch: PackedBatch) -> None:
        named = _named(batch, self.names)
        inputs = PolicyInputs(**(named | {"mask": named["mask"] > 0}))
        head.expect(batch.rows_N, batch.labels_N, PolicyTarget(inputs, self.objective))

    def finish(self, output_NC: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, sums = output_NC[0, 0], output_NC[0, 1:].detach()
        # The schedule scales the loss in place.
        return loss, dict(zip(POLICY_METRICS, sums.unbind(), strict=True)) | {"loss": loss.detach().clone()}


@dataclass(frozen=True)
class _ValueTask:
    """The value loss of what the value head says."""

    clip: float | None

    def expect(self, head: Any, batch: PackedBatch) -> None:
        head.expect(batch.rows_N, batch.labels_N)

    def finish(self, output_NC: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        named = _named(batch, _VALUE_FIELDS)
        result = value_loss(values=output_NC[:, 0], clip=self.clip, **(named | {"mask": named["mask"] > 0}))
        return result.loss, {**result.metrics, "loss": result.loss.detach().clone()}


def _named(batch: PackedBatch, names: tuple[str, ...]) -> dict[str, Tensor]:
    named = dict(zip(names, batch.fields_FN, strict=True))
    if batch.is_filler:
        named["weights"], named["mask"] = torch.zeros_like(named["weights"]), torch.zeros_like(named["mask"])
    return named


def _run(
    role: TrainedRole,
    experience: Experience,
    plan: MinibatchPlan,
    work: _Work,
    algorithm: AlgorithmSettings,
    norm_tokens: int,
) -> dict[str, float]:
    """Go through the plan's minibatches; all ranks of the world take part in each of them."""
    rollouts = experience.scored.rollouts
    counts = _token_counts(rollouts.sample_ids_B, work.mask_BR, role.runtime.device)
    ids = rollouts.sample_ids_B.tolist()
    summary = UpdateSummary()
    PROGRESS.expect("minibatches", len(plan))
    for number, minibatch in enumerate(plan):
        PROGRESS.add("minibatches", int(number > 0))  # the one before it is done
        tokens = [counts[i] for i in minibatch if counts[i] > 0]
        if not tokens:
            continue  # every sample was rejected
        chosen = [b for b, sample_id in enumerate(ids) if sample_id in minibatch]
        weights_BR = token_weights(
            mask=work.mask_BR,
            mode=algorithm.loss_aggregation,
            total_tokens=sum(tokens),
            total_sequences=len(tokens),
            norm_tokens=norm_tokens,
        )
        rows = response_rows(rollouts, chosen, work.stacked(weights_BR))
        update = role.update_minibatch(rows, work.task, stop_above=work.stop_above)
        verdict = _agree(role, summary, update)
        if not verdict.finite:
            _refuse(role, RefusedUpdate(role.placement.name, number, rows, work.task, update), algorithm)
        elif not verdict.applied:
            break
        elif role.on_jump is not None and role.jump_watch is not None:
            reasons = role.jump_watch.judge(verdict.grad_norm, verdict.kl)
            if reasons:
                role.on_jump(Jump(role.placement.name, number, reasons, describe_samples(experience, chosen)))
    return _shared_metrics(role, summary)


def _shared_metrics(role: TrainedRole, summary: UpdateSummary) -> dict[str, float]:
    """The summary of the role's first rank, on every rank of the world."""
    metrics = {f"{role.placement.name}/{name}": value for name, value in summary.metrics().items()}
    shared = [metrics]
    dist.broadcast_object_list(shared, src=role.placement.grid.ranks[0])
    return shared[0]


@dataclass(frozen=True)
class _Verdict:
    """What all ranks must know of an update."""

    finite: bool
    applied: bool
    grad_norm: float
    kl: float | None
    """KL(old || new) of the minibatch, in nats per token."""


def _agree(role: TrainedRole, summary: UpdateSummary, update: Update | None) -> _Verdict:
    """Record an update, and tell all ranks of the world, of which some have no part of the role."""
    verdict: list[Any] = [None]
    if update is not None:
        summary.updates.append(update)
        kl = update.sums.get("ppo_kl_k3")
        mean = None if kl is None else kl / max(update.sums["count"], 1.0)
        verdict = [_Verdict(update.finite, update.applied, update.grad_norm, mean)]
    dist.broadcast_object_list(verdict, src=role.placement.grid.ranks[0])
    found: _Verdict = verdict[0]
    return found


def _refuse(role: TrainedRole, refused: RefusedUpdate, algorithm: AlgorithmSettings) -> None:
    """Keep the batch for a replay, and end the run where that is configured."""
    kept = role.on_refused(refused) if role.on_refused is not None else ""
    if algorithm.on_nonfinite == "stop":
        raise NonFiniteUpdateError(
            f"the {role.placement.name}'s loss or gradient is not finite; its weights were left as they were. "
            f"Lower {role.placement.name}.optimizer.learning_rate, or set algorithm.on_nonfinite: skip to go on. {kept}"
        )


def _token_counts(sample_ids_B: Tensor, mask_BR: Tensor, device: torch.device) -> dict[int, int]:
    """Counted tokens of every sample of the step, on every rank."""
    local = torch.stack([sample_ids_B, mask_BR.sum(-1)], dim=1).to(device)
    world = dist.group.WORLD
    assert world is not None
    return {int(i): int(n) for part in all_gather_varying(local, group=world) for i, n in part.tolist()}
