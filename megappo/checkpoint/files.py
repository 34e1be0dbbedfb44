"""The files of a checkpoint's folder, its marker, and checks of whether it is whole."""

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
from megappo.observe.json_values import JSONValue
from megappo.observe.plain_files import check_plain, plain_text, synced
from megappo.runtime.waiting import pause

T = TypeVar("T")

FORMAT = 2
MARKER = "checkpoint.json"
_ASIDE = "deleted-"
"""Prefix of the name of a folder that is to be deleted."""
_NEW = ".new"
"""Suffix of the name of a checkpoint that is written while a finished one of its step exists."""
_STEP = re.compile(r"step-(\d{6,})")
_NEEDED = frozenset({"format", "step", "files", "content"})
_KINDS: dict[str, type] = dict.fromkeys(
    ("trainer", "updates", "schedules", "identity", "architectures", "settings", "versions", "metrics", "own_files"),
    dict,
) | {"world_size": int, "steps": int}
"""Types of the parts of a marker's content, where they are present."""
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG,
            errno.EFBIG}  # fmt: skip
"""Errors whose cause is the path itself, so that trying again is useless; others come from the file system or from
permissions."""
_TRIES, _PAUSE_SECONDS = 3, 0.5  # a file system that fails for a moment must not cost a whole checkpoint


class CheckpointError(RunError):
    """A checkpoint cannot be written."""


class DamagedError(Exception):
    """A checkpoint is not what was written; the message completes "the checkpoint ... is damaged: "."""


class UnreadableError(ValueError):
    """A file of a checkpoint is there and cannot be read, which says nothing of what is in it."""


@dataclass(frozen=True)
class Stamp:
    """Size and checksum of a file when it was written, by which it is recognised later."""

    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class Marker:
    """Marker of a finished checkpoint."""

    step: int
    files: dict[str, Stamp]
    content: dict[str, Any]
    """Trainer's state, settings, versions, identities, metrics; in JSON's types."""


def checkpoints_directory(run: Path) -> Path:
    """Folder of the checkpoints of the run in a directory."""
    return run / "checkpoints"


def step_folder(directory: Path, step: int) -> Path:
    """The folder of a step's checkpoint, such as `step-000010`."""
    return directory / f"step-{step:06d}"


def folders(directory: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything that looks like a checkpoint, the newest first."""
    if not directory.is_dir():
        return []
    matched = ((_STEP.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir())
    return sorted(((int(match[1]), path) for match, path in matched if match), reverse=True)


def stamp(path: Path) -> Stamp:
    """Size and checksum of a file. Raises OSError, also where it is a pipe or a device, which may have no end."""
    check_plain(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Stamp(os.fstat(file.fileno()).st_size, digest)


def _patiently(path: Path, read: Callable[[Path], T]) -> T:
    """Read a file, again where the error is not the file's fault. Raises OSError where it is, UnreadableError where it
    still cannot be read."""
    for tries_left in reversed(range(_TRIES)):
        try:
            return read(path)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise
            if not tries_left:
                raise UnreadableError(
                    f"{path} cannot be read ({error.strerror}), which need not be damage: look after the file system "
                    f"and who may read there, and start again; to go on without it, move {path.parent} away"
                ) from error
        pause(_PAUSE_SECONDS)
    raise AssertionError("the last try returns or raises")


def write_marker(folder: Path, marker: Marker) -> None:
    """Finish a checkpoint: everything else is on disk already. A reader sees the whole marker or none."""
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
    """The marker of a finished checkpoint. Raises DamagedError where it is not what `write_marker` wrote,
    UnreadableError where that cannot be said."""
    try:
        written = json.loads(_patiently(folder / MARKER, plain_text))
    except OSError as error:
        raise DamagedError(f"{MARKER} cannot be read: {error.strerror}") from error
    except UnreadableError:
        raise
    except ValueError as error:  # JSON's and UTF-8's errors
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
        raise DamagedError(f"{MARKER} does not say which torch wrote it")
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


def _stamps(told: JSONValue) -> dict[str, Stamp]:
    """The stamps of a marker's files. Raises DamagedError for names that are no files within the checkpoint's
    folder."""
    if not isinstance(told, dict):
        raise DamagedError(f"{MARKER} has no files")
    for name, written in told.items():
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
            raise DamagedError(f"{MARKER} names {show(name)}, which is no file of the folder")
        if not (isinstance(written, list) and [type(part) for part in written] == [int, str]):
            raise DamagedError(f"{MARKER} has no size and checksum of {show(name)}")
    return {name: Stamp(n_bytes, digest) for name, (n_bytes, digest) in told.items()}


def _digest(body: Mapping[str, JSONValue]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def problems(folder: Path, files: Iterable[tuple[str, Stamp]]) -> list[str]:
    """Problems of these files of a checkpoint; empty where all are as written. Raises UnreadableError."""
    found = []
    for name, written in files:
        try:
            now = _patiently(folder / name, stamp)
        except FileNotFoundError:
            found.append(f"{name} is missing")
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
        else:
            if now.n_bytes != written.n_bytes:
                found.append(f"{name} has {now.n_bytes} bytes instead of {written.n_bytes}")
            elif now != written:
                found.append(f"{name} has another content than was written")
    return found


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that the names in it survive a crash as the files do."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def writing_folder(final: Path) -> Path:
    """The folder that a checkpoint is written to: its own, or one beside it while a finished checkpoint of its step is
    there."""
    return final.with_name(final.name + _NEW) if (final / MARKER).exists() else final


def put_in_place(written: Path, final: Path) -> None:
    """Move a finished checkpoint to its place, and set aside an older one of its step."""
    if written != final:
        if final.exists():
            set_aside(final)
        written.rename(final)
        sync_folder(final.parent)


def put_all_in_place(directory: Path) -> None:
    """Complete the renames of `put_in_place` that a killed run left undone."""
    for written in sorted(directory.glob(f"step-*{_NEW}")):
        final = written.with_name(written.name.removesuffix(_NEW))
        if (written / MARKER).exists() and not final.exists():
            put_in_place(written, final)


def set_aside(folder: Path) -> None:
    """Rename a folder at once to a name that is no checkpoint's; `clear` deletes it."""
    name = _ASIDE + folder.name
    names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    folder.rename(next(aside for aside in map(folder.with_name, names) if not aside.exists()))
    sync_folder(folder.parent)


def clear(directory: Path) -> list[str]:
    """Delete folders that were set aside, now or by an earlier attempt; returns a sentence for each that cannot be
    deleted."""
    sentences = []
    for folder in sorted([*directory.glob(f"{_ASIDE}step-*"), *directory.glob(f"step-*{_NEW}")]):
        shutil.rmtree(folder, ignore_errors=True)  # deletes as much as possible
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            sentences.append(_kept(folder, error))
    return sentences


def _kept(folder: Path, error: OSError) -> str:
    return f"{folder} cannot be deleted ({error.strerror}); it is tried again with the next checkpoint"


def finished(directory: Path) -> dict[Path, Marker]:
    """The markers of all finished checkpoints by their folders, the newest first; damaged markers are left out. Raises
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
    """Delete all finished checkpoints except the newest, the best and those of every `keep_every` steps; returns a
    sentence for each that cannot be deleted.

    `keep_best` is the name of a metric, with a `-` in front where the lowest is best. `newest`: the step of the newest
    whole one; those of later steps were passed over when the run began, as damaged. Damaged checkpoints are left for
    inspection; they and unfinished ones are overwritten when their step comes again.
    """
    try:
        markers = {f: m for f, m in finished(directory).items() if newest is None or m.step <= newest}
    except UnreadableError as error:
        return [f"no checkpoint is deleted: {error}"]
    kept: set[Path | None] = set(list(markers)[:keep_last])
    if keep_best is not None:
        kept.add(best(markers, keep_best))
    if keep_every is not None:
        kept.update(folder for folder, marker in markers.items() if marker.step and marker.step % keep_every == 0)
    sentences = []
    for folder in sorted(markers.keys() - kept):
        try:
            set_aside(folder)
        except OSError as error:
            sentences.append(_kept(folder, error))
    return sentences + clear(directory)


def best(markers: Mapping[Path, Marker], keep_best: str) -> Path | None:
    """The newest folder with the best value of a metric; None where no checkpoint has it."""
    name, sign = keep_best.removeprefix("-"), -1.0 if keep_best.startswith("-") else 1.0
    values = {folder: marker.content["metrics"].get(name) for folder, marker in markers.items()}
    known = {f: sign * v for f, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}
    return max(known, key=lambda folder: (known[folder], folder.name), default=None)
