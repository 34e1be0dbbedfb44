"""The PPO step. `training_run` repeats the step.

data -> rollout -> reward -> forward -> advantages -> update critic, actor -> weight sync (version + 1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from megappo.algo.controllers import PenaltyController
from megappo.megatron.placed import PlacedBatch, announce, place
from megappo.megatron.roles import Update
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.experience import ExperienceMaker
from megappo.ppo.records.saved import ExperienceRecord
from megappo.ppo.reports.advice import refusal
from megappo.ppo.reports.jumps import Jump, describe_samples, watches_of
from megappo.ppo.reports.measures import (
    actor_mfu,
    balance_metrics,
    check_mismatch,
    environment_metrics,
    policy_kl,
    rollout_metrics,
    routing_metrics,
    source_metrics,
    sync_metrics,
)
from megappo.ppo.reports.reporting import Reporter
from megappo.ppo.rollout.cache_gauge import CacheGauge
from megappo.ppo.rollout.probe import probe_engines
from megappo.ppo.rollout.sampling import sample_seed
from megappo.ppo.rollout.scheduler import step_samples_of
from megappo.ppo.rollout.selection import Selection
from megappo.ppo.rollout.solved_prompts import report_solved_prompts
from megappo.ppo.shaping import RewardShaper
from megappo.ppo.updates import (
    MinibatchUpdate,
    NonFiniteUpdateError,
    RoleUpdates,
    actor_updates,
    critic_updates,
    draw_minibatches,
    step_metrics,
)
from megappo.runtime.ranks.tally import Totals
from megappo.types import Experience, Rollouts, Scored

KeepRefused = Callable[[RoleUpdates, MinibatchUpdate], str]


@dataclass(frozen=True)
class PlacedStep:
    """Samples of a step on the ranks of each role, until the end of the step."""

    actor: PlacedBatch | None
    """Samples of the actor. None if the actor computes nothing (value pretraining)."""
    critic: PlacedBatch | None


class Trainer:
    """The stages of a PPO step on the components of a run. Every rank must call every method at the same time."""

    def __init__(
        self,
        parts: RunComponents,
        reporter: Reporter,
        keep_refused: KeepRefused | None = None,
        *,
        keeps_engine_weights: bool = False,
    ) -> None:
        """Create the stages for the components of a run.

        Args:
            parts: models, engine, data and rewards of the run.
            reporter: output of the run.
            keep_refused: saves the minibatch of a refused update, and returns a message for the user.
            keeps_engine_weights: whether to keep this rank's part of the weights in an engine that may have older
                weights than the actor.
        """
        self.parts, self.config, self.reporter = parts, parts.config, reporter
        self.algorithm = self.config.algorithm
        self.experience_maker = ExperienceMaker(self.algorithm, parts.runtime.device)
        self.shaper = RewardShaper(self.config, parts.runtime.device)
        self.penalty = PenaltyController(self.algorithm.penalty.coef, self.algorithm.penalty.target)
        self.responses = step_samples_of(parts)
        self.record = ExperienceRecord(parts)
        self.cache_gauge = CacheGauge(parts.engine, parts.runtime)
        self.jump_watches = watches_of(self.config, (role.placement.name for role in parts.trained))
        self.step, self.weight_version = 0, 0
        self.actor_changed = True
        """True if the actor is newer than the engine weights."""
        self.engine_weights: list[Tensor] = []
        """This rank's part of the actor weights in the engine. They may be older than the actor."""
        self.metrics: dict[str, float] = {}
        self._keep_refused = keep_refused
        self._keeps_engine_weights = keeps_engine_weights and self.config.rollout.ahead == 1

    def ppo_step(self, carried: Mapping[str, float] | None = None) -> None:
        """Run the stages of one step in the order of the data.

        `carried` are metrics since the previous step. They become part of the metrics of this step.
        """
        self.metrics = dict(carried or {})
        self.reporter.begin_step(self.step)
        rollouts, scores_B = self.sample()
        placed, scored = self.forward(rollouts, scores_B)
        self.parts.stop.check()
        experience = self.estimate_advantages(scored)
        self.update_critic(placed, experience)
        self.update_actor(placed, experience)
        self.refresh_reference()
        if self.config.rollout.ahead != 1:
            self.sync_weights()
        self.metrics |= self.reporter.end_step(self.metrics, experience)
        self.metrics |= actor_mfu(self.parts, self.metrics)

    def sample(self) -> tuple[Rollouts, Tensor]:
        """Return this rank's responses of the step and their scores, after dynamic sampling."""
        if self.config.rollout.in_flight:
            self.sync_if_behind()  # a run that used `ahead: 1` before may have a stale engine
        rollouts, dynamic = self.generate(), self.config.rollout.dynamic_sampling
        if dynamic is None:
            self.release_engine(rollouts)
            self.parts.stop.check()
            rollouts, scores_B, rewards = self.reward(rollouts)
            self.metrics |= rewards
        else:
            settings = self.config.rollout
            selection = Selection(settings.prompts_per_step, settings.samples_per_prompt, dynamic.max_rounds)
            self.parts.stop.check()
            selection.add(*self.reward(rollouts))
            while missing_prompts := selection.wanted:
                more = self.generate(round_number=len(selection.rounds), prompts=missing_prompts)
                self.parts.stop.check()
                selection.add(*self.reward(more))
            rollouts, scores_B, metrics = selection.finish()
            self.metrics |= metrics
            self.release_engine(rollouts)
        return self.shape(rollouts, scores_B)

    def shape(self, rollouts: Rollouts, scores_B: Tensor) -> tuple[Rollouts, Tensor]:
        """Return the step's samples with the scores for training."""
        self.record.note(scores_B)
        self.reporter.samples(self.step, rollouts, scores_B)
        scores_B, reward_metrics = self.shaper.shape(scores_B, rollouts)
        self.metrics |= reward_metrics | source_metrics(rollouts, scores_B, self.parts)
        return rollouts, scores_B

    def generate(self, round_number: int = 0, prompts: int = 0) -> Rollouts:
        """Return the step's responses, or the responses to `prompts` more prompts in a later round of dynamic
        sampling."""
        with self.reporter.stage("rollout", f"the {self.config.rollout.batch_sequences} responses of all ranks"):
            if round_number:
                rollouts = self.responses.more(self.step, round_number, prompts)
            else:
                rollouts = self.responses.of_step(self.step, weights_changed=self.actor_changed)
        self.adopt_recovery()
        return rollouts

    def release_engine(self, rollouts: Rollouts) -> None:
        """End the generation of the step: the engine sleeps. With `rollout.ahead: 1` the engine starts generating the
        next step before this step is trained."""
        newest = self.weight_version + self.actor_changed
        self.metrics |= rollout_metrics(rollouts, self.parts.runtime, newest)
        self.metrics |= environment_metrics(rollouts, self.parts) | self.cache_gauge.metrics()
        self.metrics |= {"prompt/dropped": float(self.parts.train_prompts.dropped)} | self.responses.metrics()
        if not self.config.rollout.ahead:
            self.responses.pause()
            self.parts.engine.sleep()
        elif not self.config.rollout.in_flight and self.step < self.parts.derived.steps:
            self.sync_if_behind()
            self.responses.begin(self.step + 1)

    def reward(self, rollouts: Rollouts) -> tuple[Rollouts, Tensor, Totals]:
        """Score this rank's responses. Returns the rollouts with reward failures, the scores, and the reward
        metrics."""
        failures = dict[int, str]()
        assert self.parts.reward is not None, "saved samples have scores"
        with self.reporter.stage("reward", f"{len(rollouts.responses)} scores of {self.config.reward.summary}"):
            scores_B, metrics = self.parts.reward.score(rollouts, failures)
            noted = tuple(failures.get(b, "") for b in range(len(scores_B)))
            rollouts = replace(rollouts, reward_failures=noted)
            self.reporter.note_failures(self.step, rollouts)
            self.metrics |= report_solved_prompts(self.step, rollouts, scores_B, self.parts, self.metrics)
        return rollouts, scores_B, metrics

    def forward(self, rollouts: Rollouts, scores_B: Tensor) -> tuple[PlacedStep, Scored]:
        """Send the samples to the ranks of each role. Compute old log-probabilities, reference log-probabilities and
        values of every response token. The reference is on the ranks of the actor."""
        parts = self.parts
        with self.reporter.stage("forward"):
            announced = announce(rollouts.with_minimum(self.config.rollout.min_response_tokens), parts.runtime.device)
            actor = place(parts.actor, announced, () if self._actor_waits else self.minibatches("actor"))
            critic = place(parts.critic, announced, self.minibatches("critic")) if parts.critic else None
            compares = self.algorithm.compares_in(self.step)
            trainer_logprob = actor.forward() if compares else rollouts.engine_logprob_BR
            parts.actor.rest()
            reference = actor.for_role(parts.reference).forward() if parts.reference else None
            if parts.reference:
                parts.reference.rest()
            values = critic.forward() if critic else None  # no offload: the critic updates come next
        self.metrics |= balance_metrics(filter(None, (actor, critic)))
        for role in parts.trained:
            if role is not parts.actor or compares:
                self.metrics |= routing_metrics(role, parts.runtime)
        if compares:
            newest = self.weight_version + self.actor_changed
            self.metrics |= check_mismatch(trainer_logprob, rollouts, self.algorithm, parts.runtime, newest)
        old_logprob = rollouts.engine_logprob_BR if self.algorithm.old_logprob == "bypass" else trainer_logprob
        return PlacedStep(actor, critic), Scored(rollouts, scores_B, old_logprob, reference, values)

    def estimate_advantages(self, scored: Scored) -> Experience:
        """Compute KL in the reward, advantages and returns, and whiten over the global batch."""
        with self.reporter.stage("advantages"):
            experience, metrics = self.experience_maker.make(scored, self.config.rollout.batch_sequences)
            problem = self.record.write(self.step, experience)
        self.metrics |= metrics
        if problem:
            self.reporter.message(problem)
        return experience

    def update_critic(self, placed: PlacedStep, experience: Experience) -> None:
        """Run the epochs of value updates."""
        if placed.critic is not None:
            with self.reporter.stage("update_critic"):
                self.metrics |= self._run(critic_updates(placed.critic, experience, self.config), experience)

    def update_actor(self, placed: PlacedStep, experience: Experience) -> None:
        """Run the epochs of policy updates. Does nothing during the warmup of the critic."""
        if self._actor_waits:
            return
        assert placed.actor is not None
        with self.reporter.stage("update_actor"):
            metrics = self._run(actor_updates(placed.actor, experience, self.config, self.penalty.value), experience)
        self.metrics |= metrics
        self.actor_changed = True
        if self.algorithm.policy_loss == "penalty":
            self.metrics["actor/penalty_coef"] = self.penalty.value
            if metrics["actor/updates"]:
                self.adapt_penalty(placed.actor, experience)

    def refresh_reference(self) -> None:
        """Copy the actor to the reference every `reference.refresh_every_steps` steps."""
        settings = self.config.reference
        if settings is not None and settings.refresh_every_steps and self.step % settings.refresh_every_steps == 0:
            assert self.parts.reference is not None
            self.parts.reference.take_weights(self.parts.actor)

    def adapt_penalty(self, actor: PlacedBatch, experience: Experience) -> None:
        """Adjust the weight of KL(old || new) by the KL after the updates of the step. This needs another forward
        pass, because each update measures the KL before the update."""
        with self.reporter.stage("forward"):
            new_logprob_BR = actor.forward()
            self.parts.actor.rest()
        final_kl = policy_kl(new_logprob_BR, experience, self.parts.runtime)
        self.penalty.update(final_kl, self.config.rollout.batch_sequences)
        self.metrics["actor/final_kl"] = final_kl

    @property
    def _actor_waits(self) -> bool:
        return self.config.critic is not None and self.step <= self.config.critic.warmup_steps

    def minibatches(self, role: str) -> list[frozenset[int]]:
        """Return the sample ids of each update of actor or critic in this step."""
        seed = sample_seed(self.config.run.seed, self.step, -2 if role == "critic" else -1)
        return draw_minibatches(self.config.trained[role], self.config.rollout.batch_sequences, seed)

    def _run(self, updates: RoleUpdates, experience: Experience) -> dict[str, float]:
        """Run all updates of a role. Log unusual updates, save refused updates, and return metrics."""
        name, results = updates.batch.role.placement.name, list[Update]()
        for done in updates.run():
            self.reporter.goes_on()
            results.append(done.update)
            if not done.update.finite:
                self._refuse(updates, done)
            elif done.update.applied:
                reasons = self.jump_watches[name].judge(done.update.grad_norm, done.kl)
                if reasons:
                    samples = describe_samples(experience, done.chosen)
                    self.reporter.jump(self.step, Jump(name, done.number, reasons, samples))
        return {f"{name}/{metric}": value for metric, value in step_metrics(results).items()}

    def _refuse(self, updates: RoleUpdates, refused: MinibatchUpdate) -> None:
        """Save the batch for a replay, and end the run if configured."""
        name = updates.batch.role.placement.name
        replay_note = "" if self._keep_refused is None else self._keep_refused(updates, refused)
        if self.algorithm.on_nonfinite == "stop":
            sentences = refusal(name, self.metrics, refused.update.sums, self.algorithm)
            raise NonFiniteUpdateError(f"{sentences} {replay_note}")

    def sync_weights(self) -> None:
        """Stream the actor weights into the engine under the next version."""
        self.weight_version += 1
        with self.reporter.stage("sync") as elapsed:
            # The order matters: no generation runs while weights change, and samples in flight continue only after
            # the probe has checked the weights.
            self.responses.pause()
            report = self.parts.engine.update_weights(self.parts.weights, self.weight_version)
            self.metrics |= probe_engines(self.parts)
            self.responses.go_on()
        self.actor_changed = False
        if self._keeps_engine_weights:
            self.engine_weights = self.parts.actor.copy_weights()
        self.metrics |= sync_metrics(self.parts, elapsed.seconds, report, self.weight_version)

    def sync_if_behind(self) -> None:
        """Sync the weights if the actor has changed since the last sync."""
        if self.actor_changed:
            self.sync_weights()

    def adopt_recovery(self) -> None:
        """Adopt the version of an engine that was restarted during a rollout and received the newer actor weights."""
        if self.parts.engine.version != self.weight_version:
            self.weight_version, self.actor_changed = self.parts.engine.version, False
