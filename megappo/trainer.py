"""The PPO step. Everything else in this package is one of its verbs.

data -> rollout -> reward -> score -> advantages -> update critic, actor -> weight sync (version + 1)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megappo.algo import PenaltyController
from megappo.assembly import Parts
from megappo.evaluation import evaluate_policy
from megappo.experience import ExperienceMaker
from megappo.measures import actor_mfu, check_mismatch, rollout_metrics, sync_metrics
from megappo.models.scoring import score_responses
from megappo.models.updates import minibatch_plan, update_actor, update_critic
from megappo.reporting import Reporter
from megappo.resume import Boundary, Checkpoints
from megappo.rollout import SamplingParams, prompts_of_rank, roll_out, sample_seed
from megappo.types import Experience, Prompts, Rollouts, Scored


class Trainer:
    """Runs PPO on the parts of a run; every rank calls every method at the same time."""

    def __init__(
        self,
        parts: Parts,
        reporter: Reporter,
        checkpoints: Checkpoints | None = None,
        check_interrupts: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_interrupts` raises on every rank where the run was asked to stop; it is called between updates."""
        self.parts, self.config, self.reporter, self.checkpoints = parts, parts.config, reporter, checkpoints
        self.check_interrupts = check_interrupts
        self.algorithm = self.config.algorithm
        self.experience_maker = ExperienceMaker(self.algorithm, parts.runtime.device)
        self.penalty = PenaltyController(self.algorithm.penalty.coef, self.algorithm.penalty.target)
        self.step = 0
        self.weight_version = 0
        self.metrics: dict[str, float] = {}
        self.next_metrics: dict[str, float] = {}
        self.boundary = Boundary.of(self.state_dict(), {})
        for role in (parts.actor, parts.critic):
            if role is not None and checkpoints is not None:
                role.on_refused = lambda refused: checkpoints.keep_refused(refused, self.boundary)

    def train(self) -> None:
        """All steps that are left, with evaluations and checkpoints in between."""
        self.begin()
        while self.step < self.config.run.steps:
            self.step += 1
            self.ppo_step()
            self.evaluate_if_due()
            self.reporter.log(self.step, self.metrics)
            self.end_step()

    def begin(self) -> None:
        """Give the engine the actor's weights: the first version, or the one a checkpoint was written with."""
        if self.checkpoints is not None and self.checkpoints.resumed:
            self.load_state_dict(self.checkpoints.load())
            self.weight_version -= 1
            self.sync_weights()
            self.probe_engine()
            self.checkpoints.restore_random_states()
        else:
            self.sync_weights()
            self.evaluate_if_due()
        self.boundary = Boundary.of(self.state_dict(), self.metrics)

    def end_step(self) -> None:
        """Note where the run stands, write a checkpoint where one is due, and stop if asked to."""
        self.boundary = Boundary.of(self.state_dict(), self.metrics)
        if self.checkpoints is not None and self.checkpoints.is_due(self.step):
            with self.reporter.stage("checkpoint") as elapsed:
                self.checkpoints.save(self.boundary, wait=self.step == self.config.run.steps)
            self.next_metrics = {"time/checkpoint": elapsed.seconds}
        if self.step < self.config.run.steps:
            self.check_interrupts()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps besides models and random states, in JSON's types."""
        return {
            "step": self.step,
            "weight_version": self.weight_version,
            "kl_controller": self.experience_maker.kl_controller.state_dict(),
            "penalty": self.penalty.state_dict(),
            "cursor": self.parts.cursor.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. Raises ValueError where the data are others than the run began with."""
        self.parts.cursor.load_state_dict(state["cursor"])
        self.experience_maker.kl_controller.load_state_dict(state["kl_controller"])
        self.penalty.load_state_dict(state["penalty"])
        self.step, self.weight_version = state["step"], state["weight_version"]

    def ppo_step(self) -> None:
        """One step, in the order of the data."""
        self.metrics, self.next_metrics = self.next_metrics, {}
        self.reporter.begin_step(self.step)
        prompts = self.take_prompts()
        rollouts = self.generate(prompts)
        self.check_interrupts()
        scores_B = self.reward(rollouts)
        scored = self.score(rollouts, scores_B)
        self.check_interrupts()
        experience = self.estimate_advantages(scored)
        self.update_critic(experience)
        self.update_actor(experience)
        self.sync_weights()
        self.metrics |= self.reporter.end_step(self.metrics)
        self.metrics |= actor_mfu(self.parts, self.metrics)

    def take_prompts(self) -> Prompts:
        """This rank's share of the step's prompts."""
        indices = self.parts.cursor.take(self.config.rollout.prompts_per_step)
        self.metrics["prompt/dropped"] = float(self.parts.train_prompts.dropped)
        return prompts_of_rank(self.parts.train_prompts, indices, self.parts.runtime)

    def generate(self, prompts: Prompts) -> Rollouts:
        """Sample responses; what was sampled is what is trained on, token by token."""
        settings = self.config.rollout
        params = SamplingParams(
            temperature=settings.temperature,
            max_new_tokens=settings.max_response_tokens,
            stop_token_ids=self.parts.stop_token_ids,
            greedy=False,
        )
        requests = f"{len(prompts.prompts) * settings.samples_per_prompt} responses of the engine"
        with self.reporter.stage("rollout", requests):
            rollouts = roll_out(
                self.parts.engine,
                prompts,
                samples_per_prompt=settings.samples_per_prompt,
                params=params,
                tokenizer=self.parts.tokenizer,
                seed_of=lambda sample_id: sample_seed(self.config.run.seed, self.step, sample_id),
            )
        self.metrics |= rollout_metrics(rollouts, self.parts.runtime)
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

    def sync_weights(self) -> None:
        """Stream the actor's weights into the engine under the next version."""
        self.weight_version += 1
        with self.reporter.stage("sync") as elapsed:
            self.parts.engine.update_weights(self.parts.weights, self.weight_version)
        self.metrics |= sync_metrics(elapsed.seconds, self.parts.weights.total_bytes, self.weight_version)

    def probe_engine(self) -> None:
        """Compare engine and actor on one token per rank. Raises MismatchError where they are not the same model."""
        parts = self.parts
        rank = parts.runtime.rank
        prompts = Prompts((parts.train_prompts[rank % len(parts.train_prompts)],), first_position=rank)
        params = SamplingParams(
            temperature=self.config.rollout.temperature, max_new_tokens=1, stop_token_ids=parts.stop_token_ids
        )
        rollouts = roll_out(
            parts.engine,
            prompts,
            samples_per_prompt=1,
            params=params,
            tokenizer=parts.tokenizer,
            seed_of=lambda sample_id: sample_id,
        )
        check_mismatch(score_responses(parts.actor, rollouts), rollouts, self.algorithm, parts.runtime)

    def evaluate_if_due(self) -> None:
        """Greedy answers to the validation prompts, every `evaluation.every_steps` steps and before the first."""
        evaluation = self.config.evaluation
        if evaluation is not None and self.step % evaluation.every_steps == 0:
            with self.reporter.stage("evaluate") as elapsed:
                metrics = evaluate_policy(self.parts)
            self.metrics |= metrics | {"time/evaluate": elapsed.seconds}
            self.reporter.note_evaluation(self.step, metrics)

    def _seed(self, role: str) -> int:
        return sample_seed(self.config.run.seed, self.step, {"actor": -1, "critic": -2}[role])
