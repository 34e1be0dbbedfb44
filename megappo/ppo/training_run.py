"""All steps of a run, with evaluations, log lines and checkpoints between the steps."""

from __future__ import annotations

from dataclasses import replace

from megappo.errors import Interrupted
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.evaluation import evaluate_policy
from megappo.ppo.loaded import trainer_of
from megappo.ppo.records.checkpoints import Boundary, Checkpoints, Resumed, TrainerState
from megappo.ppo.records.exports import export_actor
from megappo.ppo.records.later_steps import forget_after
from megappo.ppo.reports.measures import restart_metrics
from megappo.ppo.reports.reporting import Reporter
from megappo.ppo.rollout.probe import probe_rollout
from megappo.ppo.updates import MinibatchUpdate, RoleUpdates


class TrainingRun:
    """Repeats the step of a `Trainer`. Every rank must call every method at the same time."""

    def __init__(self, parts: RunComponents, reporter: Reporter, checkpoints: Checkpoints | None = None) -> None:
        self.parts, self.config, self.reporter, self.checkpoints = parts, parts.config, reporter, checkpoints
        keeps = checkpoints is not None and checkpoints.keeps_engine_weights
        self.trainer = trainer_of(parts, reporter, self._keep_refused, keeps_engine_weights=keeps)
        self.is_open = True
        """True after the updates of a step, until the step is evaluated and logged."""
        self.boundary = Boundary(self.state_dict(), {}, {})
        self.is_resuming = checkpoints is not None and checkpoints.resumed is not None
        """True until the checkpoint is fully restored. A new checkpoint would be incomplete before."""
        self._carried: dict[str, float] = {}
        """Metrics since the last step, which become part of the metrics of the next step."""

    def train(self) -> None:
        """Run all remaining steps with evaluations and checkpoints."""
        self.begin()
        if self.checkpoints is not None:
            self.checkpoints.start_clock()
        while self.trainer.step < self.parts.derived.steps:
            self.trainer.step += 1
            self.trainer.ppo_step(self._carried)
            self._carried, self.is_open = {}, True
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
            self._repeat_sync(resumed)
            resumed.restore_random_states()
            self.trainer.metrics = resumed.metrics()
        else:
            self.trainer.sync_weights()
        forget_after(self.trainer.step, self.parts)
        self.log_step()
        self.is_resuming = False
        if was_open and self.trainer.step:
            self.checkpoint_if_due()  # the checkpoint does not contain an evaluation of this step

    def _repeat_sync(self, resumed: Resumed) -> None:
        """Repeat the last sync under its version. With `rollout.ahead: 1` the engine may need older weights than the
        actor. If a checkpoint lacks older weights, the engine gets the actor weights under the next version."""
        trainer, actor = self.trainer, self.parts.actor
        was_changed = trainer.actor_changed
        older = resumed.engine_weights()
        newest = actor.exchange_weights(older) if older is not None else None
        may_sample = resumed.has_engine_weights or self.config.rollout.dynamic_sampling is not None
        are_lost = older is None and was_changed and may_sample
        trainer.weight_version -= not are_lost
        trainer.sync_weights()
        probe_rollout(self.parts)
        trainer.responses.load_state_dict(resumed.kept_responses())
        if newest is not None:
            trainer.responses.begin(trainer.step + 1)
            actor.exchange_weights(newest)
        trainer.actor_changed = was_changed and not are_lost

    def log_step(self) -> None:
        """Evaluate and log a step, and store the state of the run. An interrupted run does the rest when it resumes."""
        trainer = self.trainer
        try:
            if self.is_open:
                self.evaluate_if_due()
                trainer.metrics |= restart_metrics(self.parts)
                if trainer.step:
                    self.reporter.log(trainer.step, trainer.metrics)
                self.is_open = False
            # Wait here for the responses of the next step, because that step would wait immediately.
            trainer.responses.settle(weights_changed=trainer.actor_changed)
            trainer.adopt_recovery()
        except Interrupted:
            self._note_boundary()
            raise
        self._note_boundary()

    def evaluate_if_due(self) -> None:
        """Evaluate on the validation prompts if due."""
        evaluation, trainer = self.config.evaluation, self.trainer
        if evaluation is not None and evaluation.is_due(trainer.step, self.parts.derived.steps):
            trainer.responses.settle(weights_changed=trainer.actor_changed)
            trainer.adopt_recovery()
            trainer.sync_if_behind()
            with self.reporter.stage("evaluate") as elapsed, trainer.cache_gauge.left_out():
                metrics = evaluate_policy(self.parts)
            trainer.metrics |= metrics | {"time/evaluate": elapsed.seconds}
            self.reporter.note_evaluation(trainer.step, metrics)

    def checkpoint_if_due(self) -> None:
        """Export the actor and write a checkpoint if due. Stop the run if it is interrupted or its time is over."""
        every = None if self.config.checkpoint is None else self.config.checkpoint.huggingface_every_steps
        step, is_last = self.trainer.step, self.trainer.step == self.parts.derived.steps
        if every is not None and step % every == 0:
            with self.reporter.stage("export") as elapsed:
                export_actor(self.parts, self.config.run.path / "huggingface" / f"step-{step:06d}", step)
            self._carried["time/export"] = elapsed.seconds
        if self.checkpoints is not None and self.checkpoints.is_due(step):
            with self.reporter.stage("checkpoint") as elapsed:
                self.checkpoints.save(self.boundary, wait=is_last)
            self._carried["time/checkpoint"] = elapsed.seconds
        if not is_last:
            self.parts.stop.check()
            if self.checkpoints is not None:
                self.checkpoints.stop_in_time()

    def _note_boundary(self) -> None:
        trainer, responses = self.trainer, self.trainer.responses
        responses.forget(trainer.step)
        is_behind = trainer.actor_changed and responses.needs_old_weights(trainer.step + 1)
        pending, weights = responses.state_dict(trainer.step + 1), trainer.engine_weights if is_behind else []
        self.boundary = Boundary(self.state_dict(), dict(trainer.metrics), pending, weights)

    def boundary_when_stopped(self) -> Boundary:
        """Return the boundary from which the run will resume, with the responses to keep."""
        responses = self.trainer.responses
        responses.pause(stops=True)
        pending, state = responses.state_dict(self.boundary.step + 1), self.boundary.trainer
        if responses.saves_cursor:
            state = {**state, "cursor": responses.cursor_state()}
            if self.parts.curriculum is not None:  # the curriculum may have changed since the boundary
                state["curriculum"] = self.parts.curriculum.state_dict(self.boundary.step)
        return replace(self.boundary, trainer=state, responses=self.boundary.responses | pending)

    def state_dict(self) -> TrainerState:
        """Return the state of the trainer as JSON types, without models and random states."""
        trainer = self.trainer
        state: TrainerState = {
            "step": trainer.step,
            "weight_version": trainer.weight_version,
            "actor_changed": trainer.actor_changed,
            "is_open": self.is_open,
            "kl_controller": trainer.experience_maker.kl_controller.state_dict(),
            "penalty": trainer.penalty.state_dict(),
            "jumps": {name: watch.state_dict() for name, watch in trainer.jump_watches.items()},
            "cursor": trainer.responses.cursor_state(),
        }
        if self.config.reward.normalize is not None:
            state["scores"] = trainer.shaper.state_dict()
        if self.parts.curriculum is not None:
            state["curriculum"] = self.parts.curriculum.state_dict()
        return state

    def load_state_dict(self, state: TrainerState) -> None:
        """Restore the state of a checkpoint. Raises ValueError if the data have changed since the start of the run."""
        trainer = self.trainer
        self.parts.cursor.load_state_dict(state["cursor"])
        if self.parts.curriculum is not None:
            self.parts.curriculum.load_state_dict(state.get("curriculum", ()))
        trainer.experience_maker.kl_controller.load_state_dict(state["kl_controller"])
        trainer.penalty.load_state_dict(state["penalty"])
        trainer.shaper.load_state_dict(state.get("scores", ()))
        trainer.step, trainer.weight_version = state["step"], state["weight_version"]
        trainer.actor_changed, self.is_open = state["actor_changed"], state.get("is_open", False)
        for name, watch in trainer.jump_watches.items():
            watch.load_state_dict(state["jumps"].get(name, ()))

    def _keep_refused(self, updates: RoleUpdates, refused: MinibatchUpdate) -> str:
        """Save the batch of a refused update for a replay. Returns a message for the user."""
        return "" if self.checkpoints is None else self.checkpoints.keep_refused(updates, refused, self.boundary)
