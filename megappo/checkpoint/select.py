"""Selects a checkpoint to resume, to export, or to start another run from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from megappo.checkpoint import files
from megappo.checkpoint.files import DamagedError, Marker
from megappo.checkpoint.versions import require_readable
from megappo.errors import first_of
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import agreed, all_gather_objects, attempt, broadcast_object

T = TypeVar("T")


class NoCheckpointError(ValueError):
    """All checkpoints are damaged."""


def select_checkpoint(directory: Path, runtime: Runtime | None = None) -> tuple[Path, Marker, list[str]] | None:
    """Return the newest whole checkpoint of a folder, and a sentence for each newer checkpoint that was skipped. Return
    None if the folder has no finished checkpoint.

    A collective of all ranks; each rank reads a part of the files. Without a runtime, this process reads all files.
    Raises NoCheckpointError if all finished checkpoints are damaged. Raises ValueError if the newest whole checkpoint
    is from an incompatible torch version, or if a file cannot be read. An unreadable file does not select an older
    checkpoint.
    """
    sentences: list[str] = []
    damaged = 0
    for folder, has_marker in _shared_folders(directory, runtime):
        if not has_marker:
            sentences.append(f"{folder} was not finished and is skipped")
            continue
        marker, damage = _check(folder, runtime)
        if marker is not None and not damage:
            require_readable(folder, marker)
            return folder, marker, sentences
        damaged += 1
        sentences.append(f"{folder} is damaged and is skipped: {first_of(damage, 3, '; ')}")
    if damaged:
        raise NoCheckpointError(
            f"{directory} contains no whole checkpoint: {'. '.join(sentences)}. Restore the files, or start again with "
            "another run.directory"
        )
    return None


def find_checkpoint(directory: Path, selection: str, runtime: Runtime | None = None) -> tuple[Path, Marker, list[str]]:
    """Return a whole checkpoint of a folder, and a sentence for each skipped checkpoint.

    `selection`: a step, `best` (by the run's `checkpoint.keep_best`), or `latest`. A collective like
    `select_checkpoint`. Raises ValueError if the checkpoint does not exist.
    """
    if selection == "latest":
        chosen = select_checkpoint(directory, runtime)
        if chosen is None:
            raise ValueError(f"{directory} contains no finished checkpoint; wait for the first checkpoint of the run")
        return chosen
    folder, problem = _from_main(lambda: _named(directory, selection), runtime)
    if folder is None:
        raise ValueError(problem)
    marker, damage = _check(folder, runtime)
    if marker is None or damage:
        raise NoCheckpointError(f"{folder} is damaged: {first_of(damage, 3, '; ')}; use another checkpoint")
    require_readable(folder, marker)
    return folder, marker, []


def _named(directory: Path, selection: str) -> tuple[Path | None, str]:
    """Return the folder of a step or the best checkpoint. If the folder does not exist, return None and the problem."""
    markers = files.finished(directory)
    by_step = {str(marker.step): folder for folder, marker in markers.items()}
    existing = f"finished steps: {', '.join(reversed(by_step))}" if by_step else "no checkpoint is finished"
    if selection != "best":
        problem = f"{directory} contains no checkpoint of step '{selection}'; {existing}; name a step, best or latest"
        return by_step.get(selection), problem
    settings = [marker.content["settings"].get("checkpoint") for marker in markers.values()]
    keep_best = settings[0].get("keep_best") if settings and settings[0] else None
    if not isinstance(keep_best, str):
        return None, f"the run of {directory} has no checkpoint.keep_best to select the best; {existing}; name a step"
    return files.best(markers, keep_best), f"no checkpoint in {directory} has the metric '{keep_best}'; {existing}"


def _from_main(find: Callable[[], T], runtime: Runtime | None) -> T:
    """Return the result of `find` on the main rank, or in this process without a runtime. Raises ValueError on every
    rank if `find` fails."""
    if runtime is None:
        return find()
    result, problem = broadcast_object(attempt(find) if runtime.is_main else (None, ""))
    if problem:
        raise ValueError(problem)
    return cast(T, result)


def _shared_folders(directory: Path, runtime: Runtime | None) -> list[tuple[Path, bool]]:
    """Return (folder, whether the checkpoint is finished) of all checkpoints, the newest first. The main rank lists the
    folders, because other ranks may see files of a shared disk later."""
    return _from_main(
        lambda: [(folder, (folder / files.MARKER).exists()) for _, folder in files.folders(directory)], runtime
    )


def _check(folder: Path, runtime: Runtime | None) -> tuple[Marker | None, list[str]]:
    """Return the marker and the problems of a checkpoint, equal on all ranks."""
    marker, problem = _from_main(lambda: attempt(lambda: files.read_marker(folder), (DamagedError,)), runtime)
    if marker is None:
        return None, [problem]
    if runtime is None:
        return marker, files.problems(folder, sorted(marker.files.items()))
    return marker, shared_problems(folder, marker, runtime)


def shared_problems(folder: Path, marker: Marker, runtime: Runtime) -> list[str]:
    """Return problems of the files of a checkpoint. A collective of all ranks; each rank reads a part of the files.
    Raises ValueError on every rank if a rank cannot read its part."""
    mine = sorted(marker.files.items())[runtime.rank :: runtime.world_size]
    return sorted(
        problem for part in all_gather_objects(agreed(lambda: files.problems(folder, mine))) for problem in part
    )
