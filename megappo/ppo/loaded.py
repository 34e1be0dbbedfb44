"""Training on saved experience without an engine: repeats whole steps, or trains only the critic (value
pretraining)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megappo.config.rules.experience import held_out
from megappo.megatron.placed import announce, place
from megappo.megatron.roles import Role
from megappo.observe.saved_samples import SavedStep, saved_steps
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.experience import trained_tokens
from megappo.ppo.records.experience_files import SavedSamples
from megappo.ppo.records.saved import LoadedSteps, check_tokens, joined_samples, read_some
from megappo.ppo.reports.critic_gauges import critic_metrics, tally_values
from megappo.ppo.reports.measures import balance_metrics, routing_metrics
from megappo.ppo.rollout.sampling import sample_seed, share_of_rank
from megappo.ppo.rollout.selection import renumbered
from megappo.ppo.trainer import PlacedStep, Trainer
from megappo.rewards.processes.workers import TIMED_OUT
from megappo.runtime.ranks.objects import agreed
from megappo.runtime.ranks.tally import Tally
from megappo.types import Experience, Rollouts, Scored

_EPOCHS = -4
"""Step number in the seeds that order the saved steps."""
EXPLAINED = "critic/held_out_explained_variance"


def trainer_of(parts: RunComponents, *arguments: Any, **options: Any) -> Trainer:
    """Return the trainer for the settings of a run. `arguments` and `options` are the other arguments of `Trainer`."""
    if parts.config.pretrains_critic:
        return CriticTrainer(parts, *arguments, **options)
    return (Trainer if parts.config.rollout.load_from is None else LoadedTrainer)(parts, *arguments, **options)


def failure_metrics(rollouts: Rollouts, device: torch.device) -> dict[str, float]:
    """Return `reward/failures` and `reward/timeouts` of saved samples over all ranks, from the saved reasons.

    With several reward functions, a reason starts with the name of its function and a colon.
    """
    reasons, tally = rollouts.reward_failures or ("",) * len(rollouts.sequences), Tally()
    late = [reason == TIMED_OUT or reason.partition(": ")[2] == TIMED_OUT for reason in reasons]
    tally.mean("reward/failures", torch.tensor([bool(reason) for reason in reasons], dtype=torch.bool))
    tally.mean("reward/timeouts", torch.tensor(late, dtype=torch.bool))
    return tally.reduce(device)


class LoadedTrainer(Trainer):
    """Trains each step on the saved samples of the same step, with their saved scores.

    All other quantities are computed again. With the same settings, an update repeats the update of the saved run.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # With other settings the actor differs from the sampling policy. The mismatch then indicates no engine error.
        self.algorithm = self.algorithm.model_copy(update={"mismatch_stop_nats": torch.inf})

    def sample(self) -> tuple[Rollouts, Tensor]:
        """Return this rank's samples of the step and their scores."""
        assert isinstance(self.responses, LoadedSteps)
        rollouts = self.generate()
        self.metrics |= failure_metrics(rollouts, self.parts.runtime.device)
        self.release_engine(rollouts)
        self.parts.stop.check()
        return self.shape(rollouts, self.responses.given_B)


class CriticTrainer(LoadedTrainer):
    """Trains only the critic on samples of all saved steps. The actor does not change and computes nothing."""

    def __init__(self, parts: RunComponents, *arguments: Any, **options: Any) -> None:
        super().__init__(parts, *arguments, **options)
        self._pool = SavedPool(parts)
        self._held_out = agreed(self._pool.held_out)
        self._saved = self._held_out

    @property
    def _critic(self) -> Role:
        assert self.parts.critic is not None, "validated: value pretraining has a critic"
        return self.parts.critic

    def sample(self) -> tuple[Rollouts, Tensor]:
        """Return this rank's samples of the step with their training rewards."""
        with self.reporter.stage("rollout"):
            self._saved = agreed(lambda: self._pool.of_step(self.step))
        scored = self._saved.experience.scored
        self.metrics |= failure_metrics(scored.rollouts, self.parts.runtime.device)
        self.release_engine(scored.rollouts)
        self.parts.stop.check()
        return scored.rollouts, scored.scores_B

    def forward(self, rollouts: Rollouts, scores_B: Tensor) -> tuple[PlacedStep, Scored]:
        """Compute the critic's values of every response token. The log-probabilities are the saved
        log-probabilities."""
        with self.reporter.stage("forward"):
            critic = place(self._critic, announce(rollouts, self.parts.runtime.device), self.minibatches("critic"))
            values = critic.forward()
        self.metrics |= balance_metrics([critic]) | routing_metrics(self._critic, self.parts.runtime)
        return PlacedStep(None, critic), replace(self._saved.experience.scored, values_BR=values)

    def estimate_advantages(self, scored: Scored) -> Experience:
        """Compute the returns of the saved rewards with the values of the current critic."""
        with self.reporter.stage("advantages"):
            rewards_BR, samples = self._saved.experience.rewards_BR, self.config.rollout.batch_sequences
            experience, metrics = self.experience_maker.make(scored, samples, rewards_BR)
        self.metrics |= metrics
        return experience

    def update_critic(self, placed: PlacedStep, experience: Experience) -> None:
        """Run the epochs of value updates, then compute the explained variance on held-out samples."""
        super().update_critic(placed, experience)
        with self.reporter.stage("forward"):
            self.metrics |= self._explained_variance()

    def update_actor(self, placed: PlacedStep, experience: Experience) -> None:
        """Do nothing, because the actor is not trained."""

    def refresh_reference(self) -> None:
        """Do nothing, because there is no reference."""

    def _explained_variance(self) -> dict[str, float]:
        """Return the explained variance over held-out tokens of all ranks. Empty if all returns are equal."""
        experience, runtime = self._held_out.experience, self.parts.runtime
        rollouts, rewards_BR = experience.scored.rollouts, experience.rewards_BR
        assert rewards_BR is not None, "saved samples have token rewards"
        values_BR = place(self._critic, announce(rollouts, runtime.device)).forward()
        self._critic.rest()
        tally, returns_BR = Tally(), self.experience_maker.returns_to_go(rewards_BR, rollouts)
        tally_values(tally, values_BR, returns_BR, trained_tokens(rollouts, self.config.algorithm))
        metrics = critic_metrics(tally.reduce(runtime.device))
        name = "critic/explained_variance"
        return {EXPLAINED: metrics[name]} if name in metrics else {}


class SavedPool:
    """Samples of all saved steps. The last samples are held out.

    The other samples are returned batch by batch and epoch by epoch. Each epoch orders the steps differently.
    """

    def __init__(self, parts: RunComponents) -> None:
        self._parts, config = parts, parts.config
        assert config.rollout.load_from is not None, "validated: rollout.load_from is set"
        self._steps = list(saved_steps(Path(config.rollout.load_from)).values())
        left = held_out(config, sum(step.saved for step in self._steps))
        self._trained = list[int]()
        """Number of training samples of each step, counted from its first sample."""
        for step in reversed(self._steps):
            held_out_samples = min(left, step.saved)
            self._trained.insert(0, step.saved - held_out_samples)
            left -= held_out_samples

    def held_out(self) -> SavedSamples:
        """Return this rank's share of the held-out samples."""
        places = [(s, i) for s, n in zip(self._steps, self._trained, strict=True) for i in range(n, s.saved)]
        return self._read(places)

    def of_step(self, step: int) -> SavedSamples:
        """Return this rank's share of the samples of a step of the run."""
        samples, places = self._parts.config.rollout.batch_sequences, list[tuple[SavedStep, int]]()
        first = (step - 1) * samples
        for saved, trained in self._in_order(first // sum(self._trained)):
            places += [(saved, i) for i in range(trained)]
            if len(places) >= first % sum(self._trained) + samples:
                break
        return self._read(places[first % sum(self._trained) :][:samples])

    def _in_order(self, first_epoch: int) -> Iterator[tuple[SavedStep, int]]:
        """Yield the saved steps from epoch `first_epoch` on, each with its number of training samples."""
        for epoch in count(first_epoch):
            generator = torch.Generator().manual_seed(sample_seed(self._parts.config.run.seed, _EPOCHS, epoch))
            for number in torch.randperm(len(self._steps), generator=generator).tolist():
                yield self._steps[number], self._trained[number]

    def _read(self, places: list[tuple[SavedStep, int]]) -> SavedSamples:
        """Return this rank's share of the samples at these places, renumbered."""
        first, stop = share_of_rank(len(places), self._parts.runtime)
        mine = places[first:stop] or places[:1]
        torn = (b for b in range(1, len(mine)) if mine[b][0] is not mine[b - 1][0] or mine[b][1] < mine[b - 1][1])
        borders = [0, *torn, len(mine)]
        parts = [(read_some(mine[a][0], [i for _, i in mine[a:b]]), range(b - a)) for a, b in pairwise(borders)]
        samples = check_tokens(
            joined_samples([(x, rows if stop > first else ()) for x, rows in parts]), self._parts.vocabulary
        )
        scored = samples.experience.scored
        rollouts = renumbered(scored.rollouts, torch.arange(first, stop), 1)
        return replace(samples, experience=replace(samples.experience, scored=replace(scored, rollouts=rollouts)))
