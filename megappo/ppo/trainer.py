"""The PPO step. Each other module in this package implements a stage of the step.

data -> rollout -> reward -> forward -> advantages -> update critic, actor -> weight sync (version + 1)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from megappo.algo.controllers import PenaltyController
from megappo.engines.protocol import SleepingEngine
from megappo.errors import Interrupted
from megappo.megatron.placed import PlacedBatch, announce, place
from megappo.megatron.roles import Update
from megappo.ppo.advice import refusal
from megappo.ppo.cache_gauge import CacheGauge
from megappo.ppo.checkpoints import Boundary, Checkpoints, Resumed, TrainerState
from megappo.ppo.components import RunComponents
from megappo.ppo.evaluation import evaluate_policy
from megappo.ppo.experience import ExperienceMaker
from megappo.ppo.exports import export_actor
from megappo.ppo.in_flight import responses_of
from megappo.ppo.jumps import Jump, describe_samples, watches_of
from megappo.ppo.later_steps import forget_after
from megappo.ppo.measures import (
    actor_mfu,
    balance_metrics,
    check_mismatch,
    environment_metrics,
    policy_kl,
    restart_metrics,
    rollout_metrics,
    routing_metrics,
    source_metrics,
    sync_metrics,
    update_engine,
)
from megappo.ppo.probe import probe_engines, probe_rollout
from megappo.ppo.reporting import Reporter
from megappo.ppo.sampling import sample_seed
from megappo.ppo.saved import ExperienceRecord
from megappo.ppo.selection import Selection
from megappo.ppo.shaping import RewardShaper
from megappo.ppo.solved_prompts import report_solved_prompts
from megappo.ppo.updates import (
    MinibatchUpdate,
    NonFiniteUpdateError,
    RoleUpdates,
    actor_updates,
    critic_updates,
    draw_minibatches,
    step_metrics,
)
from megappo.runtime.tally import Totals
from megappo.types import Experience, Rollouts, Scored


@dataclass(frozen=True)
class PlacedStep:
    """Samples of a step on the ranks of each role, until the end of the step."""

    actor: PlacedBatch | None
    """Samples of the actor. None if the actor computes nothing (value pretraining)."""
    critic: PlacedBatch | None


class Trainer:
    """Runs PPO on the components of a run. Every rank must call every method at the same time."""

    def __init__(self, parts: RunComponents, reporter: Reporter, checkpoints: Checkpoints | None = None) -> None:
        self.parts, self.config, self.reporter, self.checkpoints = parts, parts.config, reporter, checkpoints
        self.algorithm = self.config.algorithm
        self.experience_maker = ExperienceMaker(self.algorithm, parts.runtime.device)
        self.shaper = RewardShaper(self.config, parts.runtime.device)
        self.penalty = PenaltyController(self.algorithm.penalty.coef, self.algorithm.penalty.target)
        self.responses = responses_of(parts)
        self.record = ExperienceRecord(parts)
        self.cache_gauge = CacheGauge(parts.engine, parts.runtime)
        self.step, self.weight_version = 0, 0
        self.actor_changed = True
        """True if the actor is newer than the engine weights."""
        self.is_open = True
        """True if the updates of `step` are done, but not its evaluation and log line."""
        self.engine_weights: list[Tensor] = []
        """This rank's part of the actor weights in the engine. They may be older than the actor."""
        self.metrics: dict[str, float] = {}
        self.next_metrics: dict[str, float] = {}
        self.jump_watches = watches_of(self.config, (role.placement.name for role in parts.trained))
        self.boundary = Boundary(self.state_dict(), {}, {})
        self.is_resuming = checkpoints is not None and checkpoints.resumed is not None
        """True until the checkpoint is fully restored. A new checkpoint would be incomplete before."""

    def train(self) -> None:
        """Run all remaining steps with evaluations and checkpoints."""
        self.begin()
        if self.checkpoints is not None:
            self.checkpoints.start_clock()
        while self.step < self.parts.derived.steps:
            self.step += 1
            self.ppo_step()
            self.log_step()
            self.checkpoint_if_due()

    def begin(self) -> None:
        """Sync the actor weights to the engine as the first version, or as the version in the checkpoint."""
        was_open = False
        resumed = self.checkpoints.resumed if self.checkpoints is not None else None
        if resumed is not None:
            self.load_state_dict(resumed.load())
            was_open = self.is_open
            self.boundary = Boundary(self.state_dict(), {}, {})
            self._give_weights_again(resumed)
            resumed.restore_random_states()
            self.metrics = resumed.metrics()
        else:
            self.sync_weights()
        forget_after(self.step, self.parts)
        self.log_step()
        self.is_resuming = False
        if was_open and self.step:
            self.checkpoint_if_due()  # the checkpoint does not contain an evaluation of this step

    def _give_weights_again(self, resumed: Resumed) -> None:
        """Repeat the last sync under its version. With `rollout.ahead: 1` the engine may need older weights than the
        actor. If a checkpoint lacks older weights, the engine gets the actor weights under the next version."""
        was_changed, actor = self.actor_changed, self.parts.actor
        older = resumed.engine_weights()
        newest = actor.exchange_weights(older) if older is not None else None
        may_sample = resumed.has_engine_weights or self.config.rollout.dynamic_sampling is not None
        are_lost = older is None and was_changed and may_sample
        self.weight_version -= not are_lost
        self.sync_weights()
        probe_rollout(self.parts)
        self.responses.load_state_dict(resumed.kept_responses())
        if newest is not None:
            self.responses.begin(self.step + 1)
            actor.exchange_weights(newest)
        self.actor_changed = was_changed and not are_lost

    def log_step(self) -> None:
        """Evaluate and log a step, and store the state of the run. An interrupted run does the rest when it resumes."""
        try:
            if self.is_open:
                self.evaluate_if_due()
                self.metrics |= restart_metrics(self.parts)
                if self.step:
                    self.reporter.log(self.step, self.metrics)
                self.is_open = False
            # Wait here for the responses of the next step, because that step would wait immediately.
            self.responses.settle(weights_changed=self.actor_changed)
            self._note_recovery()
        except Interrupted:
            self._note_boundary()
            raise
        self._note_boundary()

    def checkpoint_if_due(self) -> None:
        """Export the actor and write a checkpoint if due. Stop the run if it is interrupted or its time is over."""
        every = None if self.config.checkpoint is None else self.config.checkpoint.huggingface_every_steps
        if every is not None and self.step % every == 0:
            with self.reporter.stage("export") as elapsed:
                export_actor(self.parts, self.config.run.path / "huggingface" / f"step-{self.step:06d}", self.step)
            self.next_metrics["time/export"] = elapsed.seconds
        if self.checkpoints is not None and self.checkpoints.is_due(self.step):
            with self.reporter.stage("checkpoint") as elapsed:
                self.checkpoints.save(self.boundary, wait=self.step == self.parts.derived.steps)
            self.next_metrics["time/checkpoint"] = elapsed.seconds
        if self.step < self.parts.derived.steps:
            self.parts.stop.check()
            if self.checkpoints is not None:
                self.checkpoints.stop_in_time()

    def _note_boundary(self) -> None:
        self.responses.forget(self.step)
        is_behind = self.actor_changed and self.responses.needs_old_weights(self.step + 1)
        pending, weights = self.responses.state_dict(self.step + 1), self.engine_weights if is_behind else []
        self.boundary = Boundary(self.state_dict(), dict(self.metrics), pending, weights)

    def boundary_when_stopped(self) -> Boundary:
        """Return the boundary from which the run will resume, with the responses to keep."""
        self.responses.pause(stops=True)
        pending, state = self.responses.state_dict(self.boundary.step + 1), self.boundary.trainer
        if self.responses.draws_on:
            state = {**state, "cursor": self.responses.cursor_state()}
            if self.parts.curriculum is not None:  # the curriculum may have changed since the boundary
                state["curriculum"] = self.parts.curriculum.state_dict(self.boundary.step)
        return replace(self.boundary, trainer=state, responses=self.boundary.responses | pending)

    def state_dict(self) -> TrainerState:
        """Return the state of the trainer as JSON types, without models and random states."""
        state: TrainerState = {
            "step": self.step,
            "weight_version": self.weight_version,
            "actor_changed": self.actor_changed,
            "is_open": self.is_open,
            "kl_controller": self.experience_maker.kl_controller.state_dict(),
            "penalty": self.penalty.state_dict(),
            "jumps": {name: watch.state_dict() for name, watch in self.jump_watches.items()},
            "cursor": self.responses.cursor_state(),
        }
        if self.config.reward.normalize is not None:
            state["scores"] = self.shaper.state_dict()
        if self.parts.curriculum is not None:
            state["curriculum"] = self.parts.curriculum.state_dict()
        return state

    def load_state_dict(self, state: TrainerState) -> None:
        """Restore the state of a checkpoint. Raises ValueError if the data have changed since the start of the run."""
        self.parts.cursor.load_state_dict(state["cursor"])
        if self.parts.curriculum is not None:
            self.parts.curriculum.load_state_dict(state.get("curriculum", ()))
        self.experience_maker.kl_controller.load_state_dict(state["kl_controller"])
        self.penalty.load_state_dict(state["penalty"])
        self.shaper.load_state_dict(state.get("scores", ()))
        self.step, self.weight_version = state["step"], state["weight_version"]
        self.actor_changed, self.is_open = state["actor_changed"], state.get("is_open", False)
        for name, watch in self.jump_watches.items():
            watch.load_state_dict(state["jumps"].get(name, ()))

    def ppo_step(self) -> None:
        """Run one step in the order of the data."""
        self.metrics, self.next_metrics = self.next_metrics, {}
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
        self.is_open = True

    def sample(self) -> tuple[Rollouts, Tensor]:
        """Return this rank's responses of the step and their scores, after dynamic sampling."""
        if self.config.rollout.in_flight:
            self._sync_if_behind()  # a run that used `ahead: 1` before may have a stale engine
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
        self._note_recovery()
        return rollouts

    def release_engine(self, rollouts: Rollouts) -> None:
        """End the generation of the step: the engine sleeps. With `rollout.ahead: 1` the engine starts generating the
        next step before this step is trained."""
        newest = self.weight_version + self.actor_changed
        self.metrics |= rollout_metrics(rollouts, self.parts.runtime, newest)
        self.metrics |= environment_metrics(rollouts, self.parts) | self.cache_gauge.metrics()
        self.metrics |= {"prompt/dropped": float(self.parts.train_prompts.dropped)} | self.responses.metrics()
        if not self.config.rollout.ahead:
            if isinstance(self.parts.engine, SleepingEngine):
                self.parts.engine.sleep()
        elif not self.config.rollout.in_flight and self.step < self.parts.derived.steps:
            self._sync_if_behind()
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
        replay_note = (
            self.checkpoints.keep_refused(updates, refused, self.boundary) if self.checkpoints is not None else ""
        )
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
            moving = update_engine(self.parts, self.weight_version)
            self.metrics |= probe_engines(self.parts)
            self.responses.go_on()
        self.actor_changed = False
        if self.config.rollout.ahead == 1 and self.checkpoints is not None and self.checkpoints.keeps_engine_weights:
            self.engine_weights = self.parts.actor.copy_weights()
        self.metrics |= sync_metrics(self.parts, elapsed.seconds, moving, self.weight_version)

    def _sync_if_behind(self) -> None:
        if self.actor_changed:
            self.sync_weights()

    def _note_recovery(self) -> None:
        """Adopt the version of an engine that was restarted during a rollout and received the newer actor weights."""
        if self.parts.engine.version != self.weight_version:
            self.weight_version, self.actor_changed = self.parts.engine.version, False

    def evaluate_if_due(self) -> None:
        """Evaluate on the validation prompts if due."""
        evaluation = self.config.evaluation
        if evaluation is not None and evaluation.is_due(self.step, self.parts.derived.steps):
            self.responses.settle(weights_changed=self.actor_changed)
            self._note_recovery()
            self._sync_if_behind()
            with self.reporter.stage("evaluate") as elapsed, self.cache_gauge.left_out():
                metrics = evaluate_policy(self.parts)
            self.metrics |= metrics | {"time/evaluate": elapsed.seconds}
            self.reporter.note_evaluation(self.step, metrics)
