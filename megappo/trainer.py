"""The PPO step. Everything else in this package is one of its verbs.

data -> rollout -> reward -> score -> advantages -> update critic, actor -> weight sync (version + 1)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from megappo.algo import PenaltyController
from megappo.assembly import Parts
from megappo.errors import Interrupted
from megappo.evaluation import evaluate_policy
from megappo.experience import ExperienceMaker
from megappo.generation import Responses
from megappo.measures import actor_mfu, check_mismatch, engine_metrics, rollout_metrics, sync_metrics
from megappo.models.jumps import JumpWatch
from megappo.models.scoring import score_responses
from megappo.models.updates import minibatch_plan, update_actor, update_critic
from megappo.probe import probe_engines, probe_rollout
from megappo.reporting import Reporter
from megappo.resume import Boundary, Checkpoints
from megappo.rollout import sample_seed
from megappo.types import Experience, Rollouts, Scored


class Trainer:
    """Runs PPO on the parts of a run; every rank calls every method at the same time."""

    def __init__(self, parts: Parts, reporter: Reporter, checkpoints: Checkpoints | None = None) -> None:
        self.parts, self.config, self.reporter, self.checkpoints = parts, parts.config, reporter, checkpoints
        self.algorithm = self.config.algorithm
        self.experience_maker = ExperienceMaker(self.algorithm, parts.runtime.device)
        self.penalty = PenaltyController(self.algorithm.penalty.coef, self.algorithm.penalty.target)
        self.responses = Responses(parts)
        self.step = 0
        self.weight_version = 0
        self.actor_changed = True
        """Whether the actor is newer than the engine's weights."""
        self.is_open = True
        """The updates of `step` are done, its evaluation and its line in the log are not."""
        self.engine_weights: list[Tensor] = []
        """This rank's part of the actor as the engine has it, where that may be older than the actor."""
        self.metrics: dict[str, float] = {}
        self.next_metrics: dict[str, float] = {}
        self.jump_watches: dict[str, JumpWatch] = {}
        for role in parts.trained:
            self.jump_watches[role.placement.name] = role.jump_watch = JumpWatch(self.algorithm.jumps)
            role.on_jump = lambda jump: reporter.jump(self.step, jump)
            if checkpoints is not None:
                role.on_refused = lambda refused: checkpoints.keep_refused(refused, self.boundary)
        self.boundary: Boundary = Boundary.of(self.state_dict(), {}, {})

    def train(self) -> None:
        """All steps that are left, with evaluations and checkpoints in between."""
        self.begin()
        while self.step < self.parts.derived.steps:
            self.step += 1
            self.ppo_step()
            self.finish_step()
            self.end_step()

    def begin(self) -> None:
        """Give the engine the actor's weights: the first version, or the one a checkpoint was written with."""
        was_open = False
        if self.checkpoints is not None and self.checkpoints.resumed:
            self.load_state_dict(self.checkpoints.load())
            was_open = self.is_open
            self.boundary = Boundary.of(self.state_dict(), {}, {})
            self._give_weights_again(self.checkpoints)
            self.checkpoints.restore_random_states()
            self.metrics = self.checkpoints.metrics()
        else:
            self.sync_weights()
        self.finish_step()
        if was_open and self.step:
            self.end_step()  # the checkpoint has no evaluation of this step yet

    def _give_weights_again(self, checkpoints: Checkpoints) -> None:
        """The engine gets what it had. One step ahead that may be older than the actor; where its responses were not
        whole yet, it goes on with them, or else the sync that was due is due again, with its number."""
        was_changed, actor = self.actor_changed, self.parts.actor
        older = checkpoints.engine_weights()
        newest = actor.exchange_weights(older) if older is not None else None
        self.weight_version -= 1
        self.sync_weights()
        probe_rollout(self.parts)
        self.responses.load_state_dict(checkpoints.kept_responses())
        if newest is not None:
            self.responses.begin(self.step + 1)
            actor.exchange_weights(newest)
        self.actor_changed = was_changed

    def finish_step(self) -> None:
        """Evaluate and log a step, and note where the run stands. A run that is asked to stop meanwhile does what is
        left of it when it goes on."""
        try:
            if self.is_open:
                self.evaluate_if_due()
                if self.step:
                    self.reporter.log(self.step, self.metrics)
                self.is_open = False
            # What was begun for the next step is waited for, as that step would do at once.
            self.responses.settle(weights_changed=self.actor_changed)
            self._note_recovery()
        except Interrupted:
            self._note_boundary()
            raise
        self._note_boundary()

    def end_step(self) -> None:
        """Write a checkpoint where one is due, and stop if asked to."""
        if self.checkpoints is not None and self.checkpoints.is_due(self.step):
            with self.reporter.stage("checkpoint") as elapsed:
                self.checkpoints.save(self.boundary, wait=self.step == self.parts.derived.steps)
            self.next_metrics = {"time/checkpoint": elapsed.seconds}
        if self.step < self.parts.derived.steps:
            self.parts.stop.check()

    def _note_boundary(self) -> None:
        self.responses.forget(self.step)
        is_behind = self.actor_changed and self.responses.is_torn(self.step + 1)
        self.boundary = Boundary.of(
            self.state_dict(),
            self.metrics,
            self.responses.state_dict(self.step + 1),
            self.engine_weights if is_behind else [],
        )

    def boundary_when_stopped(self) -> Boundary:
        """Where the run goes on, with the responses that it keeps."""
        kept = self.responses.state_dict(self.boundary.step + 1) or self.boundary.responses
        return replace(self.boundary, responses=kept)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps besides models and random states, in JSON's types."""
        return {
            "step": self.step,
            "weight_version": self.weight_version,
            "actor_changed": self.actor_changed,
            "is_open": self.is_open,
            "kl_controller": self.experience_maker.kl_controller.state_dict(),
            "penalty": self.penalty.state_dict(),
            "jumps": {name: watch.state_dict() for name, watch in self.jump_watches.items()},
            "cursor": self.responses.cursor_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. Raises ValueError where the data are others than the run began with."""
        self.parts.cursor.load_state_dict(state["cursor"])
        self.experience_maker.kl_controller.load_state_dict(state["kl_controller"])
        self.penalty.load_state_dict(state["penalty"])
        self.step, self.weight_version = state["step"], state["weight_version"]
        self.actor_changed, self.is_open = state["actor_changed"], state.get("is_open", False)
        for name, watch in self.jump_watches.items():
            watch.load_state_dict(state["jumps"].get(name, ()))

    def ppo_step(self) -> None:
        """One step, in the order of the data."""
        self.metrics, self.next_metrics = self.next_metrics, {}
        self.reporter.begin_step(self.step)
        rollouts = self.generate()
        self.parts.stop.check()
        scores_B = self.reward(rollouts)
        scored = self.score(rollouts, scores_B)
        self.parts.stop.check()
        experience = self.estimate_advantages(scored)
        self.update_critic(experience)
        self.update_actor(experience)
        if not self.config.rollout.ahead:
            self.sync_weights()
        self.metrics |= self.reporter.end_step(self.metrics)
        self.metrics |= actor_mfu(self.parts, self.metrics)
        self.is_open = True

    def generate(self) -> Rollouts:
        """The step's responses. One step ahead, the next step's are begun before this one is trained on."""
        with self.reporter.stage("rollout", f"the {self.parts.derived.batch_sequences} responses of all ranks"):
            rollouts = self.responses.of_step(self.step, weights_changed=self.actor_changed)
        self._note_recovery()
        newest = self.weight_version + self.actor_changed
        self.metrics |= rollout_metrics(rollouts, self.parts.runtime, newest)
        self.metrics["prompt/dropped"] = float(self.parts.train_prompts.dropped)
        if not self.config.rollout.ahead:
            if self.config.rollout.engine == "sglang":
                self.parts.engine.sleep()
        elif self.step < self.parts.derived.steps:
            self._sync_if_behind()
            self.responses.begin(self.step + 1)
        return rollouts

    def reward(self, rollouts: Rollouts) -> Tensor:
        """One score per response of this rank."""
        with self.reporter.stage("reward", f"{len(rollouts.responses)} scores of {self.config.reward.function}"):
            scores_B, metrics = self.parts.reward.score(rollouts)
        self.reporter.samples(self.step, rollouts, scores_B)
        self.metrics |= metrics
        return scores_B

    def score(self, rollouts: Rollouts, scores_B: Tensor) -> Scored:
        """Old and reference log-probabilities and values of every response token."""
        parts = self.parts
        with self.reporter.stage("score"):
            trainer_logprob = score_responses(parts.actor, rollouts)
            reference = score_responses(parts.reference, rollouts) if parts.reference else None
            values = score_responses(parts.critic, rollouts) if parts.critic else None
        self.metrics |= check_mismatch(trainer_logprob, rollouts, self.algorithm, parts.runtime)
        bypass = self.algorithm.old_logprob == "bypass"
        old_logprob = rollouts.engine_logprob_BR if bypass else trainer_logprob
        return Scored(rollouts, scores_B, old_logprob, reference, values)

    def estimate_advantages(self, scored: Scored) -> Experience:
        """KL in the reward, advantages and returns, whitening over the global batch."""
        with self.reporter.stage("advantages"):
            experience, metrics = self.experience_maker.make(scored, self.parts.derived.batch_sequences)
        self.metrics |= metrics
        return experience

    def update_critic(self, experience: Experience) -> None:
        """Epochs of value updates."""
        critic, settings = self.parts.critic, self.config.critic
        if critic is None or settings is None:
            return
        with self.reporter.stage("update_critic"):
            plan = minibatch_plan(settings, self.parts.derived.batch_sequences, self._seed("critic"))
            self.metrics |= update_critic(
                critic,
                experience,
                plan,
                settings,
                self.algorithm,
                norm_tokens=self.config.rollout.max_response_tokens,
            )

    def update_actor(self, experience: Experience) -> None:
        """Epochs of policy updates, none while the critic warms up."""
        if self.config.critic is not None and self.step <= self.config.critic.warmup_steps:
            return
        with self.reporter.stage("update_actor"):
            plan = minibatch_plan(self.config.actor, self.parts.derived.batch_sequences, self._seed("actor"))
            metrics = update_actor(
                self.parts.actor,
                experience,
                plan,
                self.algorithm,
                penalty_coef=self.penalty.value,
                norm_tokens=self.config.rollout.max_response_tokens,
            )
        if self.algorithm.policy_loss == "penalty":
            metrics["actor/penalty_coef"] = self.penalty.value
            self.penalty.update(metrics["actor/ppo_kl_k3"], self.parts.derived.batch_sequences)
        self.metrics |= metrics
        self.actor_changed = True

    def sync_weights(self) -> None:
        """Stream the actor's weights into the engine under the next version."""
        self.weight_version += 1
        with self.reporter.stage("sync") as elapsed:
            self.parts.engine.update_weights(self.parts.weights, self.weight_version)
            self.metrics |= probe_engines(self.parts)
        self.actor_changed = False
        if self.config.rollout.ahead and self.checkpoints is not None and self.checkpoints.keeps_engine_weights:
            self.engine_weights = self.parts.actor.copy_weights()
        self.metrics |= sync_metrics(elapsed.seconds, self.parts.weights.total_bytes, self.weight_version)
        self.metrics |= engine_metrics(self.parts)

    def _sync_if_behind(self) -> None:
        if self.actor_changed:
            self.sync_weights()

    def _note_recovery(self) -> None:
        """An engine that was started again during a rollout may have taken the actor's newer weights."""
        if self.parts.engine.version != self.weight_version:
            self.weight_version, self.actor_changed = self.parts.engine.version, False

    def evaluate_if_due(self) -> None:
        """Greedy answers to the validation prompts, every `evaluation.every_steps` steps and before the first."""
        evaluation = self.config.evaluation
        if evaluation is not None and self.step % evaluation.every_steps == 0:
            self.responses.settle(weights_changed=self.actor_changed)
            self._note_recovery()
            self._sync_if_behind()
            with self.reporter.stage("evaluate") as elapsed:
                metrics = evaluate_policy(self.parts)
            self.metrics |= metrics | {"time/evaluate": elapsed.seconds}
            self.reporter.note_evaluation(self.step, metrics)

    def _seed(self, role: str) -> int:
        return sample_seed(self.config.run.seed, self.step, {"actor": -1, "critic": -2}[role])
