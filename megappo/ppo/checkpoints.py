"""Connects the parts of a run to the checkpoint package: what a run saves, and how it resumes."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.checkpoint.clock import Clock, Deadline
from megappo.checkpoint.files import CheckpointError, Marker, checkpoints_directory, step_folder
from megappo.checkpoint.identity import BASE, MTP, architecture_digest, architecture_fields, weights_digest
from megappo.checkpoint.randomness import random_states, restore_random_states
from megappo.checkpoint.reader import load_values
from megappo.checkpoint.shards import (
    load_shards,
    load_weights,
    role_shards,
    role_updates,
    schedule_place,
    weight_shards,
)
from megappo.checkpoint.versions import recorded_versions
from megappo.checkpoint.writer import REMEDY, CheckpointWriter, Snapshot
from megappo.config import Config
from megappo.config.model_files import role_folder
from megappo.config.schema import CheckpointSettings
from megappo.errors import Interrupted, RunError
from megappo.megatron.roles import LocalRole, Role, Update, base_of
from megappo.observe.json_values import JSONValue
from megappo.observe.messages import tell
from megappo.plugins import own_files
from megappo.ppo.components import RunComponents
from megappo.ppo.generation import Kept
from megappo.ppo.start import Start
from megappo.ppo.updates import MinibatchUpdate, RoleUpdates
from megappo.reshard.slices import Receiver
from megappo.reshard.stream import WeightStream
from megappo.runtime.launchers import seconds_since_start, seconds_to_end
from megappo.runtime.objects import all_gather_objects, broadcast_object

_CLOSE_SECONDS = 60.0
"""Time for a pending checkpoint where a run ends early; `failures` waits a little longer before the process ends."""
_RESPONSES = "responses"
_REFERENCE = "reference"
"""Name of the reference's weights in a checkpoint, beside those of the actor, with which it shares ranks."""
_ENGINE_WEIGHTS = "engine-weights"
_MOST_FAILURES = 3
"""Failed checkpoints in a row after which the run ends."""
_MOST_REPLAYS = 3
"""Most replay folders that a run keeps: each holds models and optimizers."""


def outcome_text(update: Update) -> dict[str, str]:
    """Numbers of an update as text, so that they can be compared to the last bit, NaN included."""
    numbers = {**update.sums, "grad_norm": update.grad_norm, "learning_rate": update.learning_rate}
    return {name: repr(value) for name, value in sorted(numbers.items())}


class TrainerState(TypedDict):
    """The trainer's state besides models and random states, in JSON's types; see the `state_dict` of each part."""

    step: int
    weight_version: int
    actor_changed: bool
    is_open: NotRequired[bool]
    kl_controller: dict[str, float]
    penalty: dict[str, float]
    jumps: dict[str, list[float]]
    cursor: dict[str, JSONValue]
    scores: NotRequired[list[float]]
    curriculum: NotRequired[Any]


@dataclass(frozen=True)
class Boundary:
    """The end of a step, to be saved or returned to: everything in its checkpoint besides models and optimizers."""

    trainer: TrainerState
    metrics: dict[str, float]
    responses: Kept
    """This rank's responses that were generated one step ahead, or kept from a step that was dropped."""
    engine_weights: Sequence[Tensor] = ()
    """This rank's part of the actor as the engine has it, where the engine must resume with older weights."""
    random: dict[str, Any] = field(default_factory=random_states)
    """States of this rank's random generators."""

    @property
    def step(self) -> int:
        """The last step that is done."""
        return self.trainer["step"]


class Resumed:
    """The checkpoint from which a run resumes; every rank calls every method."""

    def __init__(self, parts: RunComponents, folder: Path, marker: Marker, identity: Mapping[str, str]) -> None:
        """`identity`: digests of the models that are not in the checkpoint."""
        self._parts, self._folder, self._marker, self._identity = parts, folder, marker, identity
        self._roles = parts.trained

    def load(self) -> TrainerState:
        """Restore models and optimizers; returns the trainer's state.

        Raises ValueError where the models are not those that the run began with.
        """
        self._check_identity()
        updates = self._marker.content["updates"]
        lacking = [role.placement.name for role in self._roles if role.placement.name not in updates]
        if lacking:
            raise ValueError(f"{self._folder} holds no {lacking[0]}; remove it from the settings, or start a new run")
        load_shards(self._folder, self._roles, updates, self._places())
        if self.reference is not None:
            load_weights(self._folder, self.reference, _REFERENCE)
        state: TrainerState = self._marker.content["trainer"]
        if self._parts.config.run.force_resume and self._has_other_data():
            # Other data start at their beginning.
            state = {**state, "cursor": self._parts.cursor.state_dict(), "curriculum": []}
        return state

    @property
    def reference(self) -> Role | None:
        """The reference, where the checkpoint holds its weights: it changes during the run, or did before."""
        before = self._marker.content["settings"].get("reference") or {}
        has_weights = before.get("refresh_every_steps") or self._marker.content.get("holds_reference")
        now = self._parts.config.reference
        return self._parts.reference if has_weights and now is not None and not now.share_actor_base else None

    def _places(self) -> dict[str, int]:
        """Where the roles' schedules go on. They run over the steps of the run, so that they move where a step has
        another number of updates than it had. Checkpoints of older versions do not tell."""
        now = _updates_per_step(self._parts)
        before = self._marker.content.get("schedules", {})
        return {name: round(place * now[name] / per_step) for name, (place, per_step) in before.items() if name in now}

    def _has_other_data(self) -> bool:
        before, now = self._marker.content["trainer"]["cursor"], self._parts.cursor.state_dict()
        return any(before[name] != now[name] for name in ("fingerprint", "seed", "shuffle"))

    def restore_random_states(self) -> None:
        """Restore this rank's random generators, if the world has its former size. Otherwise nothing is lost: training
        draws nothing from them, and samples have seeds of their own."""
        runtime = self._parts.runtime
        if self._marker.content["world_size"] == runtime.world_size:
            restore_random_states(load_values(self._folder / f"random-{runtime.rank:05d}.pt"))

    def kept_responses(self) -> list[Kept]:
        """Responses of every rank that were generated one step ahead; empty where the run resumes with other data.

        A collective of the world. Ranks split the files: if all read all, there would be as many reads as ranks times
        ranks.
        """
        if self._has_other_data():
            return []
        names, runtime = sorted(n for n in self._marker.files if n.startswith(f"{_RESPONSES}-")), self._parts.runtime
        own = {name: load_values(self._folder / name) for name in names[runtime.rank :: runtime.world_size]}
        found = {name: kept for of_rank in all_gather_objects(own) for name, kept in of_rank.items()}
        return [found[name] for name in names]

    def metrics(self) -> dict[str, float]:
        """The metrics of the step that the checkpoint was written after."""
        kept = self._marker.content["metrics"]
        return {name: float(value) if isinstance(value, str) else value for name, value in kept.items()}

    @property
    def has_engine_weights(self) -> bool:
        """Whether the engine had older weights than the actor, which its step still needs."""
        return any(name.startswith(f"{_ENGINE_WEIGHTS}-") for name in self._marker.files)

    def engine_weights(self) -> list[Tensor] | None:
        """This rank's part of the older actor with which the engine resumes; None where the engine had the newest
        weights, and on another layout."""
        before, layout = self._marker.content, self._parts.config.actor.layout.model_dump(mode="json")
        same = before["settings"]["actor"]["layout"] == layout
        if not self.has_engine_weights or not same or before["world_size"] != self._parts.runtime.world_size:
            return None
        home = _weights_home(self._parts)
        if home is None:
            return []
        found: list[Tensor] = load_values(self._folder / f"{_ENGINE_WEIGHTS}-{home:05d}.pt")
        return found

    def _check_identity(self) -> None:
        before = self._marker.content["identity"]
        for name, digest in self._identity.items():
            if before.get(name) in (None, digest):
                continue
            if name in ("reference", "actor" + MTP) and self._parts.config.run.force_resume:
                continue
            role = "actor" if name == "model" else name.split("'")[0]
            folder = role_folder(self._parts.config, role, weights=False)
            what = "weights" if name == "reference" or name.endswith((BASE, MTP)) else "config.json"
            raise ValueError(
                f"the {what} of the {name} are not those the run began with (in {folder}: sha256 {digest[:12]}, then "
                f"{before[name][:12]}); bring the folder back, or start a new run"
            )


class Checkpoints:
    """Writes a run's checkpoints; every rank calls every method."""

    def __init__(self, parts: RunComponents, start: Start) -> None:
        """A collective of the world."""
        self._parts, self._settings = parts, parts.config.checkpoint
        self._roles = parts.trained
        self._saved_step = -1 if start.is_open else start.step
        self._clock = Clock(self._settings.every_minutes if self._settings is not None else None, time.monotonic())
        now, (self._why_ends, left) = time.monotonic(), _time_left(parts.config)
        self._deadline = Deadline(None if left is None else now + left, now)
        self._began_writing = now
        self._writer: CheckpointWriter | None = None
        self._failures = 0
        """Number of checkpoints in a row that could not be written."""
        self._identity: dict[str, str] = {}
        if self._settings is not None:
            directory = checkpoints_directory(parts.config.run.path)
            seconds = parts.runtime.deadlines.collective_seconds
            self._writer = CheckpointWriter(directory, self._settings, parts.runtime, seconds)
        if self._settings is not None or start.checkpoint is not None:
            self._identity = _identity(parts)
        self.resumed: Resumed | None = None
        """The checkpoint from which the run resumes, if any."""
        if start.checkpoint is not None:
            self.resumed = Resumed(parts, *start.checkpoint, self._identity)

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is written after this step: at its intervals in steps or minutes, after the last step,
        and after one that could not be written, which is reported.

        A collective of the world, to be called once for every step. Raises CheckpointError after too many failures in a
        row.
        """
        if self._settings is None:
            return False
        if self._has_failed(wait=False):
            return True
        is_late = self._clock.is_late(time.monotonic())
        if self._settings.is_due(step, self._parts.derived.steps):
            return True
        return broadcast_object(is_late)  # ranks' clocks may differ

    def start_clock(self) -> None:
        """Start the clock at the first step."""
        self._deadline.start(time.monotonic())

    def stop_in_time(self) -> None:
        """Raise Interrupted on every rank where another step might end too late; a collective of the world, to be
        called once for every step but the last."""
        why = broadcast_object(self._why_ends if self._deadline.is_near(time.monotonic()) else "")
        if why:
            if self._parts.runtime.is_main:
                tell(f"another step may not end in time before {why}: stopping with a checkpoint")
            raise Interrupted(signal.SIGUSR1)

    def save(self, boundary: Boundary, *, wait: bool) -> None:
        """Write a checkpoint of the end of a step, unless there is one; with `wait` it is on disk afterwards.

        Models and optimizers must be in the state of the boundary. A checkpoint that cannot be written is reported and
        tried again, with `wait` at once, else after the next step. Raises CheckpointError after too many failures in a
        row.
        """
        assert self._writer is not None and self._settings is not None, "is_due was not asked"
        self._has_failed(wait=True)  # the previous one
        self._clock.restart(time.monotonic())
        while boundary.step != self._saved_step:
            self._saved_step = boundary.step
            self._began_writing = time.monotonic()
            self._writer.begin(self._snapshot(boundary))
            if not self._has_failed(wait=wait or not self._settings.asynchronous) or not wait:
                break
        _tell_warnings(self._writer)

    def _has_failed(self, *, wait: bool) -> bool:
        """Whether the pending checkpoint is known to have failed; a collective of the world."""
        assert self._writer is not None
        was_under_way = self._writer.is_busy
        problem = self._writer.outcome(wait=wait)
        if not problem:
            if was_under_way and not self._writer.is_busy:
                self._failures = 0
                self._deadline.wrote(time.monotonic() - self._began_writing)
            return False
        self._saved_step, self._failures = -1, self._failures + 1
        if self._failures >= _MOST_FAILURES:
            raise CheckpointError(f"{problem}, {self._failures} times in a row; {REMEDY}")
        if self._parts.runtime.is_main:
            tell(f"{problem}; it is tried again, {_MOST_FAILURES} times in a row at most", warns=True)
        return True

    def save_interrupted(self, boundary: Boundary) -> str:
        """Write a checkpoint of a run that was asked to stop; returns the message for its user.

        Raises RunError where the settings have no checkpoints.
        """
        if self._writer is None:
            raise RunError(f"stopped after step {boundary.step} without a checkpoint, as checkpoint is null")
        self._failures = 0  # earlier failures do not keep this one from being tried
        if self._parts.config.rollout.keeps_when_stopped and self._anywhere(boundary.responses):
            self._saved_step = -1  # the existing checkpoint of this step may lack them
        self.save(boundary, wait=True)
        return f"stopped after step {boundary.step} with a checkpoint; the same command continues the run"

    @property
    def _reference(self) -> Role | None:
        """The reference, where it has other weights than those of its folder, or will have."""
        settings = self._parts.config.reference
        if settings is not None and settings.refresh_every_steps:
            return self._parts.reference
        return self.resumed.reference if self.resumed is not None else None

    def _anywhere(self, responses: Kept) -> bool:
        """Whether any rank has responses; a collective of the world."""
        dist.all_reduce(found := torch.tensor([len(responses)], device=self._parts.runtime.device))
        return bool(found)

    def keep_refused(self, updates: RoleUpdates, refused: MinibatchUpdate, boundary: Boundary) -> str:
        """Save a minibatch with a non-finite loss or gradient and the models before it, for the first few of them.

        `boundary` is the end of the step before. Returns the message for the user.
        """
        runtime, config = self._parts.runtime, self._parts.config
        directory, step = config.run.path / "replay", boundary.step + 1
        folder = step_folder(directory, step)
        if broadcast_object(
            folder.exists() or (directory.is_dir() and len(list(directory.iterdir())) >= _MOST_REPLAYS)
        ):
            return ""
        snapshot = self._snapshot(boundary)
        kept = {
            "role": updates.batch.role.placement.name,
            "number": refused.number,
            "weights": asdict(refused.weights),
            "penalty_coef": updates.penalty_coef,
            "stop_token_ids": list(updates.batch.role.options.stop_token_ids),
            "outcome": outcome_text(refused.update),
        }
        settings = CheckpointSettings(keep_last=_MOST_REPLAYS, asynchronous=False)
        writer = CheckpointWriter(directory, settings, runtime, runtime.deadlines.collective_seconds)
        content = {**snapshot.content, "refused": kept}
        batch = updates.local_batch(refused.chosen)
        writer.save(replace(snapshot, step=step, content=content, per_rank={"batch": batch}), wait=True)
        _tell_warnings(writer)
        return f"The batch is in {folder}; `megappo train --replay {folder}` repeats the update"

    def _snapshot(self, boundary: Boundary) -> Snapshot:
        runtime = self._parts.runtime
        settings = self._parts.config.model_dump(mode="json")
        shards = {key: shard for role in self._roles for key, shard in role_shards(role).items()}
        reference = self._reference
        if reference is not None:
            shards |= weight_shards(reference, _REFERENCE)
        per_step = _updates_per_step(self._parts)
        schedules = {r.placement.name: (schedule_place(r), per_step[r.placement.name]) for r in self._roles}
        content = {
            "trainer": boundary.trainer,
            "updates": {role.placement.name: role_updates(role) for role in self._roles},
            "schedules": schedules,
            "holds_reference": reference is not None,
            "world_size": runtime.world_size,
            "identity": self._identity,
            "architectures": {role.placement.name: architecture_fields(role.arch) for role in self._roles},
            "settings": settings,
            "steps": self._parts.derived.steps,
            "versions": recorded_versions(),
            "own_files": own_files(settings),
            "metrics": {n: v if math.isfinite(v) else str(v) for n, v in boundary.metrics.items()},
        }
        per_rank: dict[str, Any] = {"random": boundary.random}
        if boundary.responses:
            per_rank[_RESPONSES] = boundary.responses
        if boundary.engine_weights and _weights_home(self._parts) == runtime.rank:
            per_rank[_ENGINE_WEIGHTS] = list(boundary.engine_weights)
        return Snapshot(boundary.step, shards, per_rank, content)

    @property
    def keeps_engine_weights(self) -> bool:
        """Whether this rank saves the engine's weights, which may be older than the actor's."""
        return self._settings is not None and _weights_home(self._parts) == self._parts.runtime.rank

    def finish(self) -> None:
        """Wait until everything is on disk."""
        if self._writer is not None:
            self._writer.wait()
            _tell_warnings(self._writer)

    def close(self) -> None:
        """Give a pending checkpoint time to finish where the run ends early."""
        if self._writer is not None:
            self._writer.abandon(_CLOSE_SECONDS)


def _updates_per_step(parts: RunComponents) -> dict[str, int]:
    """Most updates of a step, by trained role."""
    numbers = {"actor": parts.derived.actor, "critic": parts.derived.critic}
    return {name: found.updates_per_step for name, found in numbers.items() if found is not None}


def _time_left(config: Config) -> tuple[str, float | None]:
    """What ends the run first, as text, and the seconds until then; None where no end is known."""
    hours, slurm = config.run.max_hours, seconds_to_end(os.environ)
    own = None if hours is None else 3600 * hours - seconds_since_start()
    if config.checkpoint is None or (own is None and slurm is None):
        return "", None
    if own is not None and (slurm is None or own <= slurm):
        return f"run.max_hours {hours:g}", own
    return "the end that SLURM has set for the job", slurm


def _weights_home(parts: RunComponents) -> int | None:
    """The rank that saves this rank's part of the actor for all replicas; None on ranks outside of the actor."""
    if not isinstance(parts.actor, LocalRole):
        return None
    layout = parts.actor.layout
    replica, context_rank = layout.grid.first_copy(layout.replica, layout.context_rank)
    return layout.grid.rank(replica, layout.stage, layout.tensor_rank, context_rank)


def _tell_warnings(writer: CheckpointWriter) -> None:
    for sentence in writer.warnings():  # on the main rank only
        tell(sentence)


def _identity(parts: RunComponents) -> dict[str, str]:
    """Digests of the models that are not in the checkpoint; a collective of the world."""
    config = parts.config
    found = {"model": architecture_digest(role_folder(config, "actor"))}
    if config.critic is not None and config.critic.path is not None:
        found["critic"] = architecture_digest(role_folder(config, "critic"))
    frozen = {role.placement.name + BASE: base_of(role) for role in parts.trained if role.options.lora is not None}
    if parts.reference is not None and config.reference is not None and not config.reference.share_actor_base:
        frozen["reference"] = parts.reference
    rank, world = parts.runtime.rank, parts.runtime.world_size
    if parts.actor.arch.declaration.may_have_mtp_layers:
        found["actor" + MTP] = weights_digest(parts.mtp_layers.tensors(share=(rank, world)))
    for name, role in frozen.items():
        stream = WeightStream(role, config.rollout.sync_bucket_bytes)
        found[name] = weights_digest(stream.to([Receiver(to, share=(to, world)) for to in range(world)]))
    return found
