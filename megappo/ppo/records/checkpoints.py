"""Connects the parts of a run to the checkpoint package: content of a checkpoint, and resuming from one."""

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
from megappo.config.role_models import role_folder
from megappo.config.schema import CheckpointSettings
from megappo.errors import Interrupted, RunError
from megappo.files.json_values import JSONValue
from megappo.megatron.roles import LocalRole, Role, Update, base_of
from megappo.observe.terminal.messages import show_message
from megappo.plugins import own_files
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.assembly.start import Start
from megappo.ppo.rollout.step_samples import Kept
from megappo.ppo.updates import MinibatchUpdate, RoleUpdates
from megappo.reshard.slices import Receiver
from megappo.reshard.stream import WeightStream
from megappo.runtime.launchers import seconds_since_start, seconds_to_end
from megappo.runtime.ranks.objects import all_gather_objects, broadcast_object

_CLOSE_SECONDS = 60.0
"""Seconds for a pending checkpoint when a run ends early. `failures` waits slightly longer before the process exits."""
_RESPONSES = "responses"
_REFERENCE = "reference"
"""Name of the reference weights in a checkpoint. The reference shares ranks with the actor."""
_ENGINE_WEIGHTS = "engine-weights"
_MOST_FAILURES = 3
"""Number of consecutive failed checkpoints after which the run ends."""
_MOST_REPLAYS = 3
"""Maximum number of replay folders per run. Each folder contains models and optimizers."""


def outcome_text(update: Update) -> dict[str, str]:
    """Return the numbers of an update as text, so that they can be compared bit by bit, including NaN."""
    numbers = {**update.sums, "grad_norm": update.grad_norm, "learning_rate": update.learning_rate}
    return {name: repr(value) for name, value in sorted(numbers.items())}


class TrainerState(TypedDict):
    """State of the trainer as JSON types, without models and random states. See the `state_dict` of each part."""

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
    """End of a step, to be saved or restored: the content of a checkpoint except models and optimizers."""

    trainer: TrainerState
    metrics: dict[str, float]
    responses: Kept
    """This rank's responses that were generated one step ahead, or kept from a step that was dropped."""
    engine_weights: Sequence[Tensor] = ()
    """This rank's part of the actor weights in the engine, if the engine must resume with older weights."""
    random: dict[str, Any] = field(default_factory=random_states)
    """States of this rank's random generators."""

    @property
    def step(self) -> int:
        """Number of the last finished step."""
        return self.trainer["step"]


class Resumed:
    """The checkpoint from which a run resumes. Every rank must call every method."""

    def __init__(self, parts: RunComponents, folder: Path, marker: Marker, identity: Mapping[str, str]) -> None:
        """`identity`: digests of the models that are not in the checkpoint."""
        self._parts, self._folder, self._marker, self._identity = parts, folder, marker, identity
        self._roles = parts.trained

    def load(self) -> TrainerState:
        """Restore models and optimizers, and return the state of the trainer. Raises ValueError if the models differ
        from the models at the start of the run."""
        self._check_identity()
        updates = self._marker.content["updates"]
        lacking = [role.placement.name for role in self._roles if role.placement.name not in updates]
        if lacking:
            raise ValueError(f"{self._folder} has no {lacking[0]}; remove it from the settings, or start a new run")
        load_shards(self._folder, self._roles, updates, self._places())
        if self.reference is not None:
            load_weights(self._folder, self.reference, _REFERENCE)
        state: TrainerState = self._marker.content["trainer"]
        if self._parts.config.run.force_resume and self._has_other_data():
            # Different data start at their beginning.
            state = {**state, "cursor": self._parts.cursor.state_dict(), "curriculum": []}
        return state

    @property
    def reference(self) -> Role | None:
        """Reference model if the checkpoint contains reference weights: the reference changes or has changed."""
        before = self._marker.content["settings"].get("reference") or {}
        has_weights = before.get("refresh_every_steps") or self._marker.content.get("holds_reference")
        now = self._parts.config.reference
        return self._parts.reference if has_weights and now is not None and not now.share_actor_base else None

    def _places(self) -> dict[str, int]:
        """Return the positions at which the schedules continue. A position is rescaled if the number of updates per
        step has changed. Checkpoints of older versions do not contain positions."""
        now = _updates_per_step(self._parts)
        before = self._marker.content.get("schedules", {})
        return {name: round(place * now[name] / per_step) for name, (place, per_step) in before.items() if name in now}

    def _has_other_data(self) -> bool:
        before, now = self._marker.content["trainer"]["cursor"], self._parts.cursor.state_dict()
        return any(before[name] != now[name] for name in ("fingerprint", "seed", "shuffle"))

    def restore_random_states(self) -> None:
        """Restore this rank's random generators if the world size has not changed. Other runs need no restored states:
        training draws no random numbers, and samples have separate seeds."""
        runtime = self._parts.runtime
        if self._marker.content["world_size"] == runtime.world_size:
            restore_random_states(load_values(self._folder / f"random-{runtime.rank:05d}.pt"))

    def kept_responses(self) -> list[Kept]:
        """Return the responses of every rank that were generated one step ahead. Empty if the run resumes with other
        data. A collective of the world: every rank reads a part of the files."""
        if self._has_other_data():
            return []
        names, runtime = sorted(n for n in self._marker.files if n.startswith(f"{_RESPONSES}-")), self._parts.runtime
        own = {name: load_values(self._folder / name) for name in names[runtime.rank :: runtime.world_size]}
        responses = {name: of_file for of_rank in all_gather_objects(own) for name, of_file in of_rank.items()}
        return [responses[name] for name in names]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step before the checkpoint."""
        values = self._marker.content["metrics"]
        return {name: float(value) if isinstance(value, str) else value for name, value in values.items()}

    @property
    def has_engine_weights(self) -> bool:
        """True if the engine had older weights than the actor, and the next step still needs those weights."""
        return any(name.startswith(f"{_ENGINE_WEIGHTS}-") for name in self._marker.files)

    def engine_weights(self) -> list[Tensor] | None:
        """Return this rank's part of the older actor weights with which the engine resumes.

        Returns None if the engine had the newest weights, or if the layout or the world size has changed.
        """
        before, layout = self._marker.content, self._parts.config.actor.layout.model_dump(mode="json")
        same = before["settings"]["actor"]["layout"] == layout
        if not self.has_engine_weights or not same or before["world_size"] != self._parts.runtime.world_size:
            return None
        home = _weights_home(self._parts)
        if home is None:
            return []
        weights: list[Tensor] = load_values(self._folder / f"{_ENGINE_WEIGHTS}-{home:05d}.pt")
        return weights

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
                f"the {what} of the {name} are not those the run began with (in {folder}: sha256 {digest[:12]}, "
                f"formerly {before[name][:12]}); restore the folder, or start a new run"
            )


class Checkpoints:
    """Writes the checkpoints of a run. Every rank must call every method."""

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
        """Number of consecutive checkpoints that could not be written."""
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
        """Return whether a checkpoint is written after this step. A collective of the world, called once per step.

        Checkpoints are due at intervals in steps or minutes, after the last step, and after a failed checkpoint. A
        failed checkpoint is reported. Raises CheckpointError after too many consecutive failures.
        """
        if self._settings is None:
            return False
        if self._has_failed(wait=False):
            return True
        is_late = self._clock.is_late(time.monotonic())
        if self._settings.is_due(step, self._parts.derived.steps):
            return True
        return broadcast_object(is_late)  # clocks differ between ranks

    def start_clock(self) -> None:
        """Start the clock at the first step."""
        self._deadline.start(time.monotonic())

    def stop_in_time(self) -> None:
        """Raise Interrupted on every rank if the next step might end too late.

        A collective of the world, called once for every step except the last.
        """
        why = broadcast_object(self._why_ends if self._deadline.is_near(time.monotonic()) else "")
        if why:
            if self._parts.runtime.is_main:
                show_message(f"another step may not end in time before {why}: stopping with a checkpoint")
            raise Interrupted(signal.SIGUSR1)

    def save(self, boundary: Boundary, *, wait: bool) -> None:
        """Write a checkpoint at the end of a step, unless one exists. With `wait`, return after the checkpoint is on
        disk.

        Models and optimizers must be in the state of the boundary. A failed checkpoint is reported. It is retried
        immediately with `wait`, otherwise after the next step. Raises CheckpointError after too many consecutive
        failures.
        """
        assert self._writer is not None and self._settings is not None, "is_due was not called"
        self._has_failed(wait=True)  # outcome of the previous checkpoint
        self._clock.restart(time.monotonic())
        while boundary.step != self._saved_step:
            self._saved_step = boundary.step
            self._began_writing = time.monotonic()
            self._writer.begin(self._snapshot(boundary))
            if not self._has_failed(wait=wait or not self._settings.asynchronous) or not wait:
                break
        _report_warnings(self._writer)

    def _has_failed(self, *, wait: bool) -> bool:
        """Return whether the pending checkpoint is known to have failed. A collective of the world."""
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
            show_message(f"{problem}; the checkpoint is retried, {_MOST_FAILURES} times in a row at most", warns=True)
        return True

    def save_interrupted(self, boundary: Boundary) -> str:
        """Write a checkpoint of an interrupted run, and return a message for the user.

        Raises RunError if checkpoints are disabled.
        """
        if self._writer is None:
            raise RunError(f"stopped after step {boundary.step} without a checkpoint, because checkpoint is null")
        self._failures = 0  # earlier failures do not prevent this attempt
        if self._parts.config.rollout.keeps_when_stopped and self._anywhere(boundary.responses):
            self._saved_step = -1  # the existing checkpoint of this step may lack the responses
        self.save(boundary, wait=True)
        return f"stopped after step {boundary.step} with a checkpoint; the same command continues the run"

    @property
    def _reference(self) -> Role | None:
        """Reference model if its weights differ from the weights in its folder, or will differ later."""
        settings = self._parts.config.reference
        if settings is not None and settings.refresh_every_steps:
            return self._parts.reference
        return self.resumed.reference if self.resumed is not None else None

    def _anywhere(self, responses: Kept) -> bool:
        """Return whether any rank has responses. A collective of the world."""
        dist.all_reduce(count := torch.tensor([len(responses)], device=self._parts.runtime.device))
        return bool(count)

    def keep_refused(self, updates: RoleUpdates, refused: MinibatchUpdate, boundary: Boundary) -> str:
        """Save a minibatch with a non-finite loss or gradient, and the models before it. Limited to the first few
        minibatches.

        `boundary` is the end of the previous step. Returns a message for the user.
        """
        runtime, config = self._parts.runtime, self._parts.config
        directory, step = config.run.path / "replay", boundary.step + 1
        folder = step_folder(directory, step)
        if broadcast_object(
            folder.exists() or (directory.is_dir() and len(list(directory.iterdir())) >= _MOST_REPLAYS)
        ):
            return ""
        snapshot = self._snapshot(boundary)
        refusal = {
            "role": updates.batch.role.placement.name,
            "number": refused.number,
            "weights": asdict(refused.weights),
            "penalty_coef": updates.penalty_coef,
            "stop_token_ids": list(updates.batch.role.options.stop_token_ids),
            "outcome": outcome_text(refused.update),
        }
        settings = CheckpointSettings(keep_last=_MOST_REPLAYS, asynchronous=False)
        writer = CheckpointWriter(directory, settings, runtime, runtime.deadlines.collective_seconds)
        content = {**snapshot.content, "refused": refusal}
        batch = updates.local_batch(refused.chosen)
        writer.save(replace(snapshot, step=step, content=content, per_rank={"batch": batch}), wait=True)
        _report_warnings(writer)
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
        """True if this rank saves the engine weights, which may be older than the actor weights."""
        return self._settings is not None and _weights_home(self._parts) == self._parts.runtime.rank

    def finish(self) -> None:
        """Wait until everything is on disk."""
        if self._writer is not None:
            self._writer.wait()
            _report_warnings(self._writer)

    def close(self) -> None:
        """Wait for a pending checkpoint for a limited time when the run ends early."""
        if self._writer is not None:
            self._writer.abandon(_CLOSE_SECONDS)


def _updates_per_step(parts: RunComponents) -> dict[str, int]:
    """Return the maximum number of updates per step for each trained role."""
    numbers = {"actor": parts.derived.actor, "critic": parts.derived.critic}
    return {name: role.updates_per_step for name, role in numbers.items() if role is not None}


def _time_left(config: Config) -> tuple[str, float | None]:
    """Return a description of the nearest time limit and the seconds until then. ("", None) without a known limit."""
    hours, slurm = config.run.max_hours, seconds_to_end(os.environ)
    own = None if hours is None else 3600 * hours - seconds_since_start()
    if config.checkpoint is None or (own is None and slurm is None):
        return "", None
    if own is not None and (slurm is None or own <= slurm):
        return f"run.max_hours {hours:g}", own
    return "the end that SLURM has set for the job", slurm


def _weights_home(parts: RunComponents) -> int | None:
    """Return the rank that saves this rank's part of the actor for all replicas. None on ranks outside the actor."""
    if not isinstance(parts.actor, LocalRole):
        return None
    layout = parts.actor.layout
    replica, context_rank = layout.grid.first_copy(layout.replica, layout.context_rank)
    return layout.grid.rank(replica, layout.stage, layout.tensor_rank, context_rank)


def _report_warnings(writer: CheckpointWriter) -> None:
    for sentence in writer.warnings():  # only the main rank has warnings
        show_message(sentence)


def _identity(parts: RunComponents) -> dict[str, str]:
    """Return digests of the models that are not in the checkpoint. A collective of the world."""
    config = parts.config
    digests = {"model": architecture_digest(role_folder(config, "actor"))}
    if config.critic is not None and config.critic.path is not None:
        digests["critic"] = architecture_digest(role_folder(config, "critic"))
    frozen = {role.placement.name + BASE: base_of(role) for role in parts.trained if role.options.lora is not None}
    if parts.reference is not None and config.reference is not None and not config.reference.share_actor_base:
        frozen["reference"] = parts.reference
    rank, world = parts.runtime.rank, parts.runtime.world_size
    if parts.actor.arch.declaration.may_have_mtp_layers:
        digests["actor" + MTP] = weights_digest(parts.mtp_layers.tensors(share=(rank, world)))
    for name, role in frozen.items():
        stream = WeightStream(role, config.rollout.sync_bucket_bytes)
        digests[name] = weights_digest(stream.to([Receiver(to, share=(to, world)) for to in range(world)]))
    return digests
