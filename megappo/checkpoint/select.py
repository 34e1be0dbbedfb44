"""Which checkpoint a run continues from."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megappo.checkpoint import files
from megappo.checkpoint.files import DamagedError, Marker
from megappo.checkpoint.versions import require_readable
from megappo.runtime import Runtime


class NoCheckpointError(ValueError):
    """There are checkpoints, and none of them is whole."""


def select_checkpoint(directory: Path, runtime: Runtime) -> tuple[Path, Marker, list[str]] | None:
    """The newest whole checkpoint of a folder, and a sentence for each newer one that is not; None: there is none.

    A collective of the world: every rank reads a part of the files. Raises NoCheckpointError where all that were
    finished are damaged, ValueError where the newest whole one is of a torch that this one cannot read.
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
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        sentences.append(f"{folder} is damaged and is passed over: {'; '.join(found[:3])}{more}")
    if damaged:
        raise NoCheckpointError(
            f"{directory} holds no whole checkpoint: {'. '.join(sentences)}. Bring back the files, or begin again with "
            "another run.directory"
        )
    return None


def _shared_folders(directory: Path, runtime: Runtime) -> list[tuple[Path, bool]]:
    """(folder, whether it was finished), the newest first, as the main rank sees them."""
    shared: list[list[tuple[Path, bool]]] = [[]]
    if runtime.is_main:
        shared = [[(folder, (folder / files.MARKER).exists()) for _, folder in files.folders(directory)]]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _check(folder: Path, runtime: Runtime) -> tuple[Marker | None, list[str]]:
    """The marker and what is wrong with the checkpoint; the same on every rank."""
    shared: list[tuple[Marker | None, list[str]]] = [(None, [])]
    if runtime.is_main:
        try:
            shared = [(files.read_marker(folder), [])]
        except DamagedError as error:
            shared = [(None, [str(error)])]
    dist.broadcast_object_list(shared, src=0)
    marker, found = shared[0]
    if marker is None:
        return None, found
    return marker, shared_problems(folder, marker, runtime)


def shared_problems(folder: Path, marker: Marker, runtime: Runtime) -> list[str]:
    """What is wrong with a checkpoint's files, each of which one rank reads; a collective of the world."""
    mine = sorted(marker.files.items())[runtime.rank :: runtime.world_size]
    gathered: list[list[str]] = [[] for _ in range(runtime.world_size)]
    dist.all_gather_object(gathered, files.problems(folder, mine))
    return sorted(problem for part in gathered for problem in part)
