"""Where a run begins, and what it leaves to continue from: wires the checkpoint room to the parts of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.assembly import Parts, load_architecture, model_folder
from megappo.checkpoint import (
    CheckpointWriter,
    Clock,
    Marker,
    Snapshot,
    compare_settings,
    keep_kl_unit,
    load_shards,
    load_values,
    random_states,
    restore_random_states,
    role_shards,
    role_updates,
    select_checkpoint,
    step_folder,
)
from megappo.checkpoint.files import put_all_in_place
from megappo.checkpoint.identity import architecture_digest, weights_digest
from megappo.checkpoint.versions import software_versions
from megappo.config import Config, ConfigError, Derived, load_config
from megappo.config.schema import CheckpointSettings
from megappo.errors import RunError
from megappo.generation import Kept
from megappo.models.build import DTYPES
from megappo.models.roles import Update
from megappo.models.updates import RefusedUpdate
from megappo.observe import read_metrics
from megappo.reshard.stream import WeightStream
from megappo.runtime import Runtime

_CLOSE_SECONDS = 60.0
_RESPONSES = "responses"
_ENGINE_WEIGHTS = "engine-weights"
_MOST_REPLAYS = 3
"""Each holds models and optimizers."""


def checkpoints_directory(config: Config) -> Path:
    """Where a run's checkpoints lie."""
    return config.run.path / "checkpoints"


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    config: Config
    """Its settings: those that were given, with what stays as the checkpoint has it."""
    folder: Path | None
    """The checkpoint it continues from; None: from nothing."""
    marker: Marker | None
    sentences: tuple[str, ...]
    """What its user should know."""

    @property
    def step(self) -> int:
        """The last step that is done, -1 before the evaluation that comes before the first."""
        return self.marker.step if self.marker is not None else -1

    @property
    def is_open(self) -> bool:
        """Whether that step is still to be evaluated and logged."""
        return self.marker is not None and bool(self.marker.content["trainer"].get("is_open", False))


def choose_start(config: Config, derived: Derived, runtime: Runtime) -> Start:
    """The newest whole checkpoint of the run directory, or the beginning; a collective of the world.

    Raises ConfigError where the directory holds a run that cannot be continued, or not with these settings.
    """
    if runtime.is_main:
        put_all_in_place(checkpoints_directory(config))
    chosen = select_checkpoint(checkpoints_directory(config), runtime)
    if chosen is None:
        return _begin(config, runtime)
    folder, marker, sentences = chosen
    steps = (run_steps(marker), derived.steps)
    given, (then, config) = config, keep_kl_unit(marker.content["settings"], config)
    changes = compare_settings(then, config.model_dump(mode="json"), steps)
    if changes.dangerous and not config.run.force_resume:
        raise ConfigError(
            f"run.directory '{config.run.path}' holds a run with other settings ({'; '.join(changes.dangerous)}); set "
            "them back, choose another run.directory, or set run.force_resume: true to go on with them"
        )
    sentences.append(f"continuing after step {marker.step} from {folder}")
    sentences += [f"changed since then: {change}" for change in (*changes.dangerous, *changes.harmless)]
    sentences += _kl_sentences(given, config)
    before = marker.content["versions"]
    for name, version in software_versions().items():
        if before.get(name) != version:
            sentences.append(f"changed since then: {name} {before.get(name)} -> {version}")
    return Start(config, folder, marker, tuple(sentences))


def _kl_sentences(given: Config, kept: Config) -> list[str]:
    """What the adaptive KL goes on with, where a new run of the same settings would do otherwise."""
    asked, kl = given.algorithm.kl_in_reward, kept.algorithm.kl_in_reward
    if asked is None or kl is None or asked.per == kl.per or kl.controller != "adaptive":
        return []
    return [
        f"the adaptive KL goes on towards {kl.target_nats:g} nats per {kl.per}, as it began; set "
        f"algorithm.kl_in_reward.per for another unit"
    ]


def run_steps(marker: Marker) -> int:
    """How many PPO steps the run of a checkpoint was to have."""
    # Checkpoints of before there were epochs have settings that say it.
    return int(marker.content.get("steps") or marker.content["settings"]["run"]["steps"])


def _begin(config: Config, runtime: Runtime) -> Start:
    """A run without a checkpoint begins again, if it was stopped before it could have written one."""
    shared: list[tuple[str | None, int]] = [(None, 0)]
    if runtime.is_main:
        shared = [lost_steps(config)]
    dist.broadcast_object_list(shared, src=0)
    problem, lost = shared[0]
    if problem is not None:
        raise ConfigError(problem)
    sentence = f"the run in {config.run.path} was stopped before its first checkpoint and begins again"
    return Start(config, None, None, (sentence,) if lost else ())


def lost_steps(config: Config) -> tuple[str | None, int]:
    """(why the run directory cannot be used, logged lines that will be run again)."""
    metrics = config.run.path / "metrics.jsonl"
    if not metrics.exists() or not metrics.stat().st_size:
        return None, 0
    try:
        lines = read_metrics(metrics)
        saved = config.run.path / "config.yaml"
        before = load_config(saved) if saved.exists() else None
    except ValueError as error:
        return str(error), 0
    # In the background a checkpoint may have been under way until the next one was due.
    settings = before.checkpoint if before is not None else None
    last = lines[-1]["step"] if lines else -1
    has_ended = (before is not None and last == before.run.steps) or (config.run.path / "final").exists()
    if settings is not None and not has_ended and last < 2 * settings.every_steps:
        return None, len(lines)
    return (
        f"run.directory '{config.run.path}' holds a run without any checkpoint to continue from; choose another "
        "run.directory or run.name, or remove the folder"
    ), 0


def outcome_text(update: Update) -> dict[str, str]:
    """The numbers of an update as text, so that they can be compared to the last bit, NaN included."""
    numbers = {**update.sums, "grad_norm": update.grad_norm, "learning_rate": update.learning_rate}
    return {name: repr(value) for name, value in sorted(numbers.items())}


@dataclass(frozen=True)
class Boundary:
    """The end of a step: what a checkpoint of it holds besides models and optimizers."""

    trainer: dict[str, Any]
    """The trainer's state, in JSON's types."""
    metrics: dict[str, float]
    random: dict[str, Any]
    """This rank's generators."""
    responses: Kept
    """This rank's, generated one step ahead, or kept of a step that was given up."""
    engine_weights: Sequence[Tensor] = ()
    """This rank's part of the actor as the engine has it, where it has to go on with older weights."""

    @classmethod
    def of(
        cls,
        trainer: dict[str, Any],
        metrics: Mapping[str, float],
        responses: Kept,
        engine_weights: Sequence[Tensor] = (),
    ) -> Boundary:
        """This moment."""
        return cls(trainer, dict(metrics), random_states(), responses, engine_weights)

    @property
    def step(self) -> int:
        """The last step that is done."""
        return int(self.trainer["step"])


class Checkpoints:
    """Writes a run's checkpoints and loads the one it starts from; every rank calls every method."""

    def __init__(self, parts: Parts, start: Start, tell: Callable[[str], None] = print) -> None:
        """`tell` is given what a user should know, on the main rank."""
        self._tell = tell
        self._parts, self._start, self._settings = parts, start, parts.config.checkpoint
        self._roles = parts.trained
        self._saved_step = -1 if start.is_open else start.step
        self._clock = Clock(self._settings.every_minutes if self._settings is not None else None, time.monotonic())
        self._writer: CheckpointWriter | None = None
        self._identity: dict[str, Any] = {}
        if self._settings is not None:
            directory, seconds = checkpoints_directory(parts.config), parts.config.runtime.collective_timeout_seconds
            self._writer = CheckpointWriter(directory, self._settings, parts.runtime, seconds)
        if self._settings is not None or start.marker is not None:
            self._identity = _identity(parts)

    @property
    def resumed(self) -> bool:
        """Whether the run continues from a checkpoint."""
        return self._start.marker is not None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is written after this step: every so many steps or minutes, and after the last. A
        collective of the world, once for every step."""
        if self._settings is None:
            return False
        shared = [self._clock.is_late(time.monotonic())]
        if step == self._parts.derived.steps or step % self._settings.every_steps == 0:
            return True
        dist.broadcast_object_list(shared, src=0)  # ranks may disagree about what is late
        return shared[0]

    def save(self, boundary: Boundary, *, wait: bool) -> None:
        """Write a checkpoint of the end of a step, unless there is one; with `wait` it is on disk afterwards.

        Models and optimizers must be those of the boundary.
        """
        assert self._writer is not None, "is_due was not asked"
        self._clock.restart(time.monotonic())
        if boundary.step != self._saved_step:
            self._saved_step = boundary.step
            self._writer.save(self._snapshot(boundary), wait=wait)
        elif wait:
            self._writer.wait()
        self._tell_warnings(self._writer)

    def save_interrupted(self, boundary: Boundary) -> str:
        """Write a checkpoint of a run that was asked to stop; returns what to tell its user.

        Raises RunError where the settings have no checkpoints.
        """
        if self._writer is None:
            raise RunError(f"stopped after step {boundary.step} without a checkpoint, as checkpoint is null")
        if self._parts.config.rollout.when_stopped == "keep" and self._anywhere(boundary.responses):
            self._saved_step = -1  # the checkpoint of this step may be there without them
        self.save(boundary, wait=True)
        return f"stopped after step {boundary.step} with a checkpoint; the same command continues the run"

    def _anywhere(self, responses: Kept) -> bool:
        """Whether any rank has some; a collective of the world."""
        dist.all_reduce(found := torch.tensor([len(responses)], device=self._parts.runtime.device))
        return bool(found)

    def keep_refused(self, refused: RefusedUpdate, boundary: Boundary) -> str:
        """Save a minibatch with a non-finite loss or gradient and the models that met it, the first few times.

        `boundary` is the end of the step before. Returns what to tell the user.
        """
        runtime, config = self._parts.runtime, self._parts.config
        directory, step = config.run.path / "replay", boundary.step + 1
        folder = step_folder(directory, step)
        shared = [folder.exists() or (directory.is_dir() and len(list(directory.iterdir())) >= _MOST_REPLAYS)]
        dist.broadcast_object_list(shared, src=0)
        if shared[0]:
            return ""
        snapshot = self._snapshot(boundary)
        outcome = [refused.update]
        first = self._parts.actor if refused.role == "actor" else self._parts.critic
        assert first is not None
        dist.broadcast_object_list(outcome, src=first.placement.grid.ranks[0])
        assert outcome[0] is not None
        kept = {
            "role": refused.role,
            "number": refused.number,
            "names": refused.names,
            "penalty_coef": refused.penalty_coef,
            "outcome": outcome_text(outcome[0]),
        }
        batch = {
            "sample_ids": [row.sample_id for row in refused.rows],
            "integers": [row.integers.cpu() for row in refused.rows],
            "floats": [row.floats.cpu() for row in refused.rows],
        }
        settings = CheckpointSettings(keep_last=_MOST_REPLAYS, asynchronous=False)
        writer = CheckpointWriter(directory, settings, runtime, config.runtime.collective_timeout_seconds)
        content = {**snapshot.content, "refused": kept}
        writer.save(replace(snapshot, step=step, content=content, per_rank={"batch": batch}), wait=True)
        self._tell_warnings(writer)
        return f"The batch is in {folder}; `megappo train --replay {folder}` repeats the update"

    def _snapshot(self, boundary: Boundary) -> Snapshot:
        runtime = self._parts.runtime
        shards = {key: shard for role in self._roles for key, shard in role_shards(role).items()}
        content = {
            "trainer": boundary.trainer,
            "updates": {role.placement.name: role_updates(role, runtime) for role in self._roles},
            "world_size": runtime.world_size,
            "identity": self._identity,
            "architectures": self._parts.architectures,
            "settings": self._parts.config.model_dump(mode="json"),
            "steps": self._parts.derived.steps,
            "versions": software_versions(),
            "metrics": {n: v if math.isfinite(v) else str(v) for n, v in boundary.metrics.items()},
        }
        per_rank: dict[str, Any] = {"random": boundary.random}
        if boundary.responses:
            per_rank[_RESPONSES] = boundary.responses
        if boundary.engine_weights and self._weights_home == runtime.rank:
            per_rank[_ENGINE_WEIGHTS] = list(boundary.engine_weights)
        return Snapshot(boundary.step, shards, per_rank, content)

    def load(self) -> dict[str, Any]:
        """Put models and optimizers where the checkpoint was; returns the trainer's state.

        Raises ValueError where the models are others than the run began with.
        """
        folder, marker = self._start.folder, self._start.marker
        assert folder is not None and marker is not None
        self._check_identity(marker)
        updates = marker.content["updates"]
        lacking = [role.placement.name for role in self._roles if role.placement.name not in updates]
        if lacking:
            raise ValueError(f"{folder} holds no {lacking[0]}; remove it from the settings, or start a new run")
        load_shards(folder, self._roles, updates, self._parts.runtime)
        state: dict[str, Any] = marker.content["trainer"]
        if self._parts.config.run.force_resume and self._has_other_data(marker):
            state = {**state, "cursor": self._parts.cursor.state_dict()}  # other data are begun at their beginning
        return state

    def _has_other_data(self, marker: Marker) -> bool:
        before, now = marker.content["trainer"]["cursor"], self._parts.cursor.state_dict()
        return any(before[name] != now[name] for name in ("fingerprint", "seed", "shuffle"))

    def restore_random_states(self) -> None:
        """Put this rank's generators back, where the world has the size it had; nothing that is learned draws from
        them, samples have seeds of their own."""
        folder, marker = self._start.folder, self._start.marker
        assert folder is not None and marker is not None
        runtime = self._parts.runtime
        if marker.content["world_size"] == runtime.world_size:
            restore_random_states(load_values(folder / f"random-{runtime.rank:05d}.pt"))

    def kept_responses(self) -> list[Kept]:
        """What every rank had generated one step ahead; nothing where the run goes on with other data."""
        folder, marker = self._start.folder, self._start.marker
        assert folder is not None and marker is not None
        if self._has_other_data(marker):
            return []
        names = sorted(name for name in marker.files if name.startswith(f"{_RESPONSES}-"))
        return [load_values(folder / name) for name in names]

    def metrics(self) -> dict[str, float]:
        """Of the step it was written after."""
        assert self._start.marker is not None
        kept = self._start.marker.content["metrics"]
        return {name: float(value) if isinstance(value, str) else value for name, value in kept.items()}

    def engine_weights(self) -> list[Tensor] | None:
        """This rank's part of the older actor with which the engine goes on; None where it has the newest weights, and
        on another layout."""
        folder, marker = self._start.folder, self._start.marker
        assert folder is not None and marker is not None
        same = marker.content["settings"]["actor"]["layout"] == self._parts.config.actor.layout.model_dump(mode="json")
        is_there = any(name.startswith(f"{_ENGINE_WEIGHTS}-") for name in marker.files)
        if not is_there or not same or marker.content["world_size"] != self._parts.runtime.world_size:
            return None
        if self._weights_home is None:
            return []
        found: list[Tensor] = load_values(folder / f"{_ENGINE_WEIGHTS}-{self._weights_home:05d}.pt")
        return found

    @property
    def keeps_engine_weights(self) -> bool:
        """Whether this rank writes the weights that the engine has, where they may be older than the actor's."""
        return self._settings is not None and self._weights_home == self._parts.runtime.rank

    @property
    def _weights_home(self) -> int | None:
        """The rank that writes for all replicas what this rank holds of the actor; None on ranks outside it."""
        layout = self._parts.actor.placement.layout
        first = layout.replica if layout and layout.grid.replicas_in_step else 0  # replicas may hold other experts
        return layout.grid.rank(first, layout.stage, layout.tensor_rank) if layout else None

    def finish(self) -> None:
        """Wait until everything is on disk."""
        if self._writer is not None:
            self._writer.wait()
            self._tell_warnings(self._writer)

    def close(self) -> None:
        """Let a checkpoint under way be finished where the run ends early."""
        if self._writer is not None:
            self._writer.abandon(_CLOSE_SECONDS)

    def _tell_warnings(self, writer: CheckpointWriter) -> None:
        for sentence in writer.warnings():
            self._tell(sentence)

    def _check_identity(self, marker: Marker) -> None:
        before = marker.content["identity"]
        for name, digest in self._identity.items():
            if before.get(name) in (None, digest):
                continue
            if name == "reference" and self._parts.config.run.force_resume:
                continue
            what = "weights" if name == "reference" else "config.json"
            raise ValueError(
                f"the {what} of the {name} are not those the run began with (sha256 {digest[:12]}, then "
                f"{before[name][:12]}); bring the folder back, or start a new run"
            )


def _identity(parts: Parts) -> dict[str, str]:
    """Digests of the models that are not in the checkpoint; a collective of the world."""
    config = parts.config
    model = model_folder(config.model.path)
    found = {"model": architecture_digest(model)}
    if config.critic is not None and config.critic.path is not None:
        found["critic"] = architecture_digest(model_folder(config.critic.path))
    if parts.reference is not None and config.reference is not None:
        folder = model_folder(config.reference.path) if config.reference.path is not None else model
        stream = WeightStream(
            parts.reference.placement.grid,
            load_architecture(folder, config.model.trust_remote_code),
            parts.reference.model,
            padded_vocab=parts.derived.actor.padded_vocab_size,
            dtype=DTYPES[config.model.dtype],
            device=parts.runtime.device,
            bucket_bytes=config.rollout.sync_bucket_bytes,
        )
        found["reference"] = weights_digest(stream, parts.runtime)
    return found
