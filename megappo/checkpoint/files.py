"""Files of a checkpoint folder, its marker, and integrity checks."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from megappo.errors import RunError, show
from megappo.files.json_values import JSONValue
from megappo.files.plain_files import check_plain, plain_text, synced
from megappo.runtime.waiting import pause

T = TypeVar("T")

FORMAT = 2
MARKER = "checkpoint.json"
_ASIDE = "deleted-"
"""Prefix for names of folders that will be deleted."""
_NEW = ".new"
"""Suffix for the name of a checkpoint that is written while a finished checkpoint of the same step exists."""
_STEP = re.compile(r"step-(\d{6,})")
_NEEDED = frozenset({"format", "step", "files", "content"})
_KINDS: dict[str, type] = dict.fromkeys(
    ("trainer", "updates", "schedules", "identity", "architectures", "settings", "versions", "metrics", "own_files"),
    dict,
) | {"world_size": int, "steps": int}
"""Types of the optional parts of a marker's content."""
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG,
            errno.EFBIG}  # fmt: skip
"""Errors of the path, for which a retry is useless. Other errors are from the file system or from permissions."""
_TRIES, _PAUSE_SECONDS = 3, 0.5  # a temporary failure of the file system must not invalidate a checkpoint


class CheckpointError(RunError):
    """A checkpoint cannot be written."""


class DamagedError(Exception):
    """A checkpoint is damaged. The message follows "the checkpoint ... is damaged: "."""


class UnreadableError(ValueError):
    """A file of a checkpoint exists and cannot be read. The content may be intact."""


@dataclass(frozen=True)
class Stamp:
    """Size and checksum of a written file, for later checks."""

    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class Marker:
    """Marker of a finished checkpoint."""

    step: int
    files: dict[str, Stamp]
    content: dict[str, Any]
    """State of the trainer, settings, versions, identities and metrics, in JSON types."""


def checkpoints_directory(run: Path) -> Path:
    """Return the checkpoint folder of a run directory."""
    return run / "checkpoints"


def step_folder(directory: Path, step: int) -> Path:
    """Return the folder of a checkpoint, such as `step-000010`."""
    return directory / f"step-{step:06d}"


def folders(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of all folders with the name of a checkpoint, the newest first."""
    if not directory.is_dir():
        return []
    matched = ((_STEP.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir())
    return sorted(((int(match[1]), path) for match, path in matched if match), reverse=True)


def stamp(path: Path) -> Stamp:
    """Return size and checksum of a file. Raises OSError if the file cannot be read, or is not a regular file."""
    check_plain(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Stamp(os.fstat(file.fileno()).st_size, digest)


def _retry_read(path: Path, read: Callable[[Path], T]) -> T:
    """Read a file, with retries for errors of the file system. Raises OSError for errors of the path, and
    UnreadableError if all tries fail."""
    for tries_left in reversed(range(_TRIES)):
        try:
            return read(path)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise
            if not tries_left:
                raise UnreadableError(
                    f"{path} cannot be read ({error.strerror}), but may be undamaged: check the file system and the "
                    f"permissions, and start again; to continue without this checkpoint, move {path.parent} away"
                ) from error
        pause(_PAUSE_SECONDS)
    raise AssertionError("the last try returns or raises")


def write_marker(folder: Path, marker: Marker) -> None:
    """Finish a checkpoint after all other files are on disk. The marker is written atomically."""
    body: dict[str, JSONValue] = {
        "format": FORMAT,
        "step": marker.step,
        "files": {name: [file.n_bytes, file.sha256] for name, file in sorted(marker.files.items())},
        "content": marker.content,
    }
    partial = folder / (MARKER + ".partial")
    with synced(partial) as file:
        file.write(json.dumps({"sha256": _digest(body), "body": body}, indent=1).encode())
    sync_folder(folder)
    partial.replace(folder / MARKER)
    sync_folder(folder)
    sync_folder(folder.parent)


def read_marker(folder: Path) -> Marker:
    """Return the marker of a finished checkpoint. Raises DamagedError if the marker differs from the output of
    `write_marker`, and UnreadableError if the marker cannot be read."""
    try:
        written = json.loads(_retry_read(folder / MARKER, plain_text))
    except OSError as error:
        raise DamagedError(f"{MARKER} cannot be read: {error.strerror}") from error
    except UnreadableError:
        raise
    except ValueError as error:  # errors of JSON and UTF-8
        raise DamagedError(f"{MARKER} is not valid JSON") from error
    except RecursionError as error:
        raise DamagedError(f"{MARKER} is nested too deeply") from error
    body = written.get("body") if isinstance(written, dict) else None
    if not isinstance(body, dict) or written.get("sha256") != _digest(body):
        raise DamagedError(f"{MARKER} differs from its own checksum")
    if body.get("format") != FORMAT or not body.keys() >= _NEEDED:
        raise DamagedError(f"{MARKER} has format {body.get('format')}, this version reads {FORMAT}")
    if type(body["step"]) is not int or not isinstance(body["content"], dict):
        raise DamagedError(f"{MARKER} has no step or no content")
    for name, kind in _KINDS.items():
        if name in body["content"] and type(body["content"][name]) is not kind:
            raise DamagedError(f"{MARKER} has {show(body['content'][name])} as its {name}")
    if type(body["content"].get("versions", {"torch": ""}).get("torch")) is not str:
        raise DamagedError(f"{MARKER} does not contain the version of torch")
    for part, kinds in (("settings", (dict, type(None))), ("architectures", (dict,)), ("updates", (int,))):
        for name, values in body["content"].get(part, {}).items():
            if not isinstance(values, kinds):
                raise DamagedError(f"{MARKER} has {show(values)} as {name} of its {part}")
    for role, place in body["content"].get("schedules", {}).items():
        numbers = place if isinstance(place, list) else []
        if [type(number) for number in numbers] != [int, int] or not 0 <= numbers[0] < 2**62 or numbers[1] < 1:
            raise DamagedError(f"{MARKER} has {show(place)} as {role} of its schedules")
    if folder.name != step_folder(folder.parent, body["step"]).name:
        raise DamagedError(f"{MARKER} belongs to step {body['step']}")
    return Marker(body["step"], _stamps(body["files"]), body["content"])


def _stamps(recorded: JSONValue) -> dict[str, Stamp]:
    """Return the stamps of the files of a marker. Raises DamagedError if a name is not a file in the checkpoint
    folder."""
    if not isinstance(recorded, dict):
        raise DamagedError(f"{MARKER} has no files")
    for name, written in recorded.items():
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
            raise DamagedError(f"{MARKER} names {show(name)}, which is not a file of the folder")
        if not (isinstance(written, list) and [type(part) for part in written] == [int, str]):
            raise DamagedError(f"{MARKER} has no size and checksum of {show(name)}")
    return {name: Stamp(n_bytes, digest) for name, (n_bytes, digest) in recorded.items()}


def _digest(body: Mapping[str, JSONValue]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def problems(folder: Path, files: Iterable[tuple[str, Stamp]]) -> list[str]:
    """Return the problems of files of a checkpoint; empty if all files are unchanged. Raises UnreadableError."""
    sentences = []
    for name, written in files:
        try:
            now = _retry_read(folder / name, stamp)
        except FileNotFoundError:
            sentences.append(f"{name} is missing")
        except OSError as error:
            sentences.append(f"{name} cannot be read: {error.strerror}")
        else:
            if now.n_bytes != written.n_bytes:
                sentences.append(f"{name} has {now.n_bytes} bytes instead of {written.n_bytes}")
            elif now != written:
                sentences.append(f"{name} has changed content")
    return sentences


def sync_folder(folder: Path) -> None:
    """Call fsync for a folder, so that the names in the folder survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def writing_folder(final: Path) -> Path:
    """Return the folder for writing a checkpoint: the final folder, or a temporary folder if a finished checkpoint of
    the same step exists."""
    return final.with_name(final.name + _NEW) if (final / MARKER).exists() else final


def put_in_place(written: Path, final: Path) -> None:
    """Move a finished checkpoint to the final folder, and set aside an older checkpoint of the same step."""
    if written != final:
        if final.exists():
            set_aside(final)
        written.rename(final)
        sync_folder(final.parent)


def put_all_in_place(directory: Path) -> None:
    """Complete the renames of `put_in_place` after a killed run."""
    for written in sorted(directory.glob(f"step-*{_NEW}")):
        final = written.with_name(written.name.removesuffix(_NEW))
        if (written / MARKER).exists() and not final.exists():
            put_in_place(written, final)


def set_aside(folder: Path) -> None:
    """Rename a folder, so that the folder is not a checkpoint. `clear` deletes the folder."""
    name = _ASIDE + folder.name
    names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    folder.rename(next(aside for aside in map(folder.with_name, names) if not aside.exists()))
    sync_folder(folder.parent)


def clear(directory: Path) -> list[str]:
    """Delete folders that were set aside, also by an earlier attempt. Return a sentence for each folder that cannot be
    deleted."""
    sentences = []
    for folder in sorted([*directory.glob(f"{_ASIDE}step-*"), *directory.glob(f"step-*{_NEW}")]):
        shutil.rmtree(folder, ignore_errors=True)  # deletes as much as possible
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            sentences.append(_undeleted(folder, error))
    return sentences


def _undeleted(folder: Path, error: OSError) -> str:
    return f"{folder} cannot be deleted ({error.strerror}); the run tries again with the next checkpoint"


def finished(directory: Path) -> dict[Path, Marker]:
    """Return the markers of all finished checkpoints by folder, the newest first. Damaged markers are skipped. Raises
    UnreadableError."""
    markers: dict[Path, Marker] = {}
    for _, folder in folders(directory):
        with suppress(DamagedError):
            if (folder / MARKER).exists():
                markers[folder] = read_marker(folder)
    return markers


def prune(
    directory: Path, keep_last: int, keep_best: str | None, keep_every: int | None = None, *, newest: int | None = None
) -> list[str]:
    """Delete finished checkpoints, except the newest `keep_last`, the best, and every `keep_every` steps.

    Args:
        directory: checkpoint folder of the run.
        keep_last: number of newest checkpoints to keep.
        keep_best: name of a metric, with the prefix `-` if the lowest value is best.
        keep_every: interval in steps of checkpoints to keep.
        newest: step of the newest whole checkpoint. Later checkpoints were skipped as damaged at the start of the run,
            and are not deleted.

    Return a sentence for each checkpoint that cannot be deleted. Damaged checkpoints remain for inspection. The run
    overwrites damaged and unfinished checkpoints when the run reaches their steps again.
    """
    try:
        markers = {f: m for f, m in finished(directory).items() if newest is None or m.step <= newest}
    except UnreadableError as error:
        return [f"no checkpoint is deleted: {error}"]
    retained: set[Path | None] = set(list(markers)[:keep_last])
    if keep_best is not None:
        retained.add(best(markers, keep_best))
    if keep_every is not None:
        retained.update(folder for folder, marker in markers.items() if marker.step and marker.step % keep_every == 0)
    sentences = []
    for folder in sorted(markers.keys() - retained):
        try:
            set_aside(folder)
        except OSError as error:
            sentences.append(_undeleted(folder, error))
    return sentences + clear(directory)


def best(markers: Mapping[Path, Marker], keep_best: str) -> Path | None:
    """Return the newest folder with the best value of a metric, or None if no checkpoint has the metric."""
    name, sign = keep_best.removeprefix("-"), -1.0 if keep_best.startswith("-") else 1.0
    values = {folder: marker.content["metrics"].get(name) for folder, marker in markers.items()}
    known = {f: sign * v for f, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}
    return max(known, key=lambda folder: (known[folder], folder.name), default=None)
