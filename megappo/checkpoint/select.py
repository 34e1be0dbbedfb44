"""Selects the checkpoint that a run continues from, that is exported, or that another run starts from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from megappo.checkpoint import files
from megappo.checkpoint.files import DamagedError, Marker
from megappo.checkpoint.versions import require_readable
from megappo.errors import first_of
from megappo.runtime.objects import agreed, all_gather_objects, attempt, broadcast_object
from megappo.runtime.process import Runtime

T = TypeVar("T")


class NoCheckpointError(ValueError):
    """There are checkpoints, and none of them is whole."""


def select_checkpoint(directory: Path, runtime: Runtime | None = None) -> tuple[Path, Marker, list[str]] | None:
    """The newest whole checkpoint of a folder, and a sentence for each newer one that is not; None: there is none.

    A collective of the world, in which every rank reads a part of the files; without a runtime this process reads all
    of them. Raises NoCheckpointError where all that were finished are damaged, ValueError where the newest whole one is
    of a torch that this one cannot read, and where a file cannot be read now: that is no reason to go back to an older
    checkpoint.
    """
    sentences: list[str] = []
    damaged = 0
    for folder, has_marker in _shared_folders(directory, runtime):
        if not has_marker:
            sentences.append(f"{folder} was not finished and is passed over")
            continue
        marker, found = _check(folder, runtime)
        if marker is not None and not found:
            require_readable(folder, marker)
            return folder, marker, sentences
        damaged += 1
        sentences.append(f"{folder} is damaged and is passed over: {first_of(found, 3, '; ')}")
    if damaged:
        raise NoCheckpointError(
            f"{directory} holds no whole checkpoint: {'. '.join(sentences)}. Bring back the files, or begin again with "
            "another run.directory"
        )
    return None


def find_checkpoint(directory: Path, wanted: str, runtime: Runtime | None = None) -> tuple[Path, Marker, list[str]]:
    """The whole checkpoint of a folder that `wanted` names: a step, `best` by the run's `checkpoint.keep_best`, or
    `latest`; and a sentence for each that was passed over. A collective like `select_checkpoint`.

    Raises ValueError where there is none.
    """
    if wanted == "latest":
        chosen = select_checkpoint(directory, runtime)
        if chosen is None:
            raise ValueError(f"{directory} holds no finished checkpoint; wait for the run's first one")
        return chosen
    folder, problem = _from_main(lambda: _named(directory, wanted), runtime)
    if folder is None:
        raise ValueError(problem)
    marker, found = _check(folder, runtime)
    if marker is None or found:
        raise NoCheckpointError(f"{folder} is damaged: {first_of(found, 3, '; ')}; take another checkpoint")
    require_readable(folder, marker)
    return folder, marker, []


def _named(directory: Path, wanted: str) -> tuple[Path | None, str]:
    """The folder of a step or of the best one, or why there is none."""
    markers = files.finished(directory)
    by_step = {str(marker.step): folder for folder, marker in markers.items()}
    there = f"there are {', '.join(reversed(by_step))}" if by_step else "there is no finished one"
    if wanted != "best":
        problem = f"{directory} holds no checkpoint of step '{wanted}'; {there}; give one of them, best or latest"
        return by_step.get(wanted), problem
    settings = [marker.content["settings"].get("checkpoint") for marker in markers.values()]
    keep_best = settings[0].get("keep_best") if settings and settings[0] else None
    if not isinstance(keep_best, str):
        return None, f"the run of {directory} has no checkpoint.keep_best to say which is best; {there}; give one"
    return files.best(markers, keep_best), f"no checkpoint in {directory} has the metric '{keep_best}'; {there}"


def _from_main(find: Callable[[], T], runtime: Runtime | None) -> T:
    """The result of `find` on the main rank, or in this process without a runtime. Raises ValueError on every rank
    where it fails."""
    if runtime is None:
        return find()
    found, problem = broadcast_object(attempt(find) if runtime.is_main else (None, ""))
    if problem:
        raise ValueError(problem)
    return cast(T, found)


def _shared_folders(directory: Path, runtime: Runtime | None) -> list[tuple[Path, bool]]:
    """(folder, whether it was finished) of all checkpoints, the newest first, as the main rank sees them: on a shared
    disk others may see them later."""
    return _from_main(
        lambda: [(folder, (folder / files.MARKER).exists()) for _, folder in files.folders(directory)], runtime
    )


def _check(folder: Path, runtime: Runtime | None) -> tuple[Marker | None, list[str]]:
    """The marker and the problems of a checkpoint; the same on every rank."""
    marker, problem = _from_main(lambda: attempt(lambda: files.read_marker(folder), (DamagedError,)), runtime)
    if marker is None:
        return None, [problem]
    if runtime is None:
        return marker, files.problems(folder, sorted(marker.files.items()))
    return marker, shared_problems(folder, marker, runtime)


def shared_problems(folder: Path, marker: Marker, runtime: Runtime) -> list[str]:
    """Problems of a checkpoint's files, each of which one rank reads; a collective of the world. Raises ValueError on
    every rank where one cannot read its part now."""
    mine = sorted(marker.files.items())[runtime.rank :: runtime.world_size]
    return sorted(
        problem for part in all_gather_objects(agreed(lambda: files.problems(folder, mine))) for problem in part
    )
