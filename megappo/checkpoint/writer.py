"""Writes checkpoints, with `checkpoint.asynchronous` in the background.

Megatron's writer uses forked processes, which outlive a killed trainer and continue to write to the run directory. This
module writes a copy of Megatron's shards with torch's writer, in a thread of this process. The collectives use a
separate process group. On a shared group, they would interleave with the collectives of training.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import mcore_to_pyt_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from megappo.checkpoint import files
from megappo.checkpoint.files import CheckpointError, Marker, Stamp
from megappo.checkpoint.reader import METADATA
from megappo.checkpoint.storage import storage_writer
from megappo.config.schema import CheckpointSettings
from megappo.files.plain_files import synced
from megappo.runtime.launchers import note_for_job
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.groups import make_host_group
from megappo.runtime.ranks.objects import all_gather_objects, attempt
from megappo.runtime.waiting import wait_until

_SHARED_SECONDS = 30.0  # maximum time until the main rank sees all files on a shared disk
REMEDY = "make room or fix the folder and start again, the run continues from the previous checkpoint"


@dataclass(frozen=True)
class Snapshot:
    """Copy of the content of a checkpoint. The copy does not change."""

    step: int
    shards: Mapping[str, ShardedTensor]
    """Weights and optimizer state of this rank, on the CPU."""
    per_rank: dict[str, Any]
    """Values that only this rank has, by prefix of the file name: tensors and plain values."""
    content: dict[str, Any]
    """All other content in JSON types. Only the content of the main rank is written."""


class CheckpointWriter:
    """Writes one checkpoint at a time. All ranks must call the same methods."""

    def __init__(self, directory: Path, settings: CheckpointSettings, runtime: Runtime, timeout_seconds: float) -> None:
        """Create the process group. A collective of all ranks."""
        self._directory, self._settings, self._runtime = directory, settings, runtime
        self._group = make_host_group("checkpoint", datetime.timedelta(seconds=timeout_seconds))
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._warnings: list[str] = []

    def save(self, snapshot: Snapshot, *, wait: bool) -> None:
        """Write a checkpoint. In asynchronous mode, the method returns immediately, unless `wait` is set.

        Raises CheckpointError on every rank if this checkpoint cannot be written. In asynchronous mode, the error may
        be of the previous checkpoint.
        """
        self.wait()
        self.begin(snapshot)
        if wait or not self._settings.asynchronous:
            self.wait()

    def begin(self, snapshot: Snapshot) -> None:
        """Start to write a checkpoint and return immediately. The previous checkpoint must be complete."""
        assert self._thread is None, "neither outcome nor wait was called"
        self._thread = threading.Thread(target=self._write_guarded, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint was started, and neither `outcome` nor `wait` has reported the end."""
        return self._thread is not None

    def warnings(self) -> list[str]:
        """Return sentences about harmless problems since the last call, on the main rank."""
        sentences, self._warnings = self._warnings, []
        return sentences

    def abandon(self, seconds: float) -> None:
        """Wait at most `seconds` for the running checkpoint, and ignore its error. The run ends with a different
        error."""
        if self._thread is not None:
            self._thread.join(seconds)

    def wait(self) -> None:
        """Wait until the running checkpoint is on disk. Raises CheckpointError if the checkpoint could not be
        written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def outcome(self, *, wait: bool) -> str:
        """Return the error of the running checkpoint, or "" if the checkpoint is written or still running.

        A collective of all ranks with the same result on all ranks. A failure is reported after all ranks have
        finished.
        `wait`: wait until all ranks have finished.
        """
        if self._thread is None:
            return ""
        if wait:
            self._thread.join()
        has_ended = not self._thread.is_alive()
        of_ranks = all_gather_objects((has_ended, str(self._failure or "") if has_ended else ""))
        if not all(ended for ended, _ in of_ranks):
            return ""
        self._thread = None
        if self._failure is not None and not isinstance(self._failure, CheckpointError):
            raise self._failure
        self._failure = None
        return next((reason.removesuffix(f"; {REMEDY}") for _, reason in of_ranks if reason), "")

    def _write_guarded(self, snapshot: Snapshot) -> None:
        try:
            if self._runtime.on_cuda:  # a new thread uses GPU 0, and torch's writer would allocate memory there
                torch.cuda.set_device(self._runtime.device)
            self._write(snapshot)
        except CheckpointError as error:  # on all ranks; `wait` raises the error again in the calling thread
            self._failure = error
        except BaseException as error:  # noqa: BLE001 - as above, but the other ranks wait for this rank
            self._failure = error
            self._runtime.failures.report(error)

    def _write(self, snapshot: Snapshot) -> None:
        final = files.step_folder(self._directory, snapshot.step)
        folder: Path = self._together(snapshot.step, lambda: self._prepare(final))[0]
        state = mcore_to_pyt_state_dict({key: [shard] for key, shard in snapshot.shards.items()})
        try:
            dcp.save(
                state,
                storage_writer=storage_writer(folder),
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._group,
            )
        except CheckpointException as error:  # raised on every rank if one rank failed
            first = next(iter(error.failures.values()))[0]
            raise self._cannot(snapshot.step, str(first)) from error
        stamps = self._together(snapshot.step, lambda: self._finish_rank(folder, snapshot))
        written = {name: stamp for of_rank in stamps for name, stamp in of_rank.items()}
        marker = Marker(snapshot.step, written, snapshot.content)
        self._together(snapshot.step, lambda: self._commit(folder, final, marker))

    def _prepare(self, final: Path) -> Path:
        """Create the folder, and set aside an unfinished folder of the same step. Return the folder. All ranks must use
        the folder of the main rank."""
        folder = files.writing_folder(final)
        if self._runtime.is_main:
            if folder.exists():
                files.set_aside(folder)
            folder.mkdir(parents=True)
        return folder

    def _finish_rank(self, folder: Path, snapshot: Snapshot) -> dict[str, Stamp]:
        """Write the small files. Return the stamps of all files of this rank."""
        rank = self._runtime.rank
        own = []
        for name, value in snapshot.per_rank.items():
            own.append(f"{name}-{rank:05d}.pt")
            with synced(folder / own[-1]) as file:
                torch.save(value, file)
        own += [path.name for path in folder.glob(f"__{rank}_*.distcp")]
        if self._runtime.is_main:
            own.append(METADATA)
        return {name: files.stamp(folder / name) for name in own}

    def _commit(self, folder: Path, final: Path, marker: Marker) -> None:
        if self._runtime.is_main:
            _wait_for(folder, marker)
            files.write_marker(folder, marker)
            files.put_in_place(folder, final)
            note_for_job(os.environ, "checkpoint", marker.step)
            # Only a warning: the new checkpoint is complete, even if an old one cannot be deleted (a busy file on NFS).
            retention = (self._settings.keep_last, self._settings.keep_best, self._settings.keep_every_steps)
            self._warnings += files.prune(self._directory, *retention, newest=marker.step)

    def _together(self, step: int, work: Callable[[], Any]) -> list[Any]:
        """Run the work of this rank and wait for all other ranks. Raises CheckpointError on every rank if a rank
        failed."""
        # torch raises RuntimeError for tensors that cannot be written.
        results = all_gather_objects(attempt(work, (OSError, RuntimeError)), group=self._group)
        if reason := next((reason for _, reason in results if reason), ""):
            raise self._cannot(step, reason)
        return [value for value, _ in results]

    def _cannot(self, step: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of step {step} could not be written in {self._directory}: {reason}; {REMEDY}"
        )


def _wait_for(folder: Path, marker: Marker) -> None:
    """Wait until this machine sees the files of all machines. Raises OSError after a timeout."""

    def missing() -> list[str]:
        return sorted(marker.files.keys() - {path.name for path in folder.iterdir()})

    if not wait_until(lambda: not missing(), _SHARED_SECONDS, every_seconds=0.1):
        raise OSError(f"{', '.join(missing())} did not appear; run.directory must be on a disk that all machines share")
