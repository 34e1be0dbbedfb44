"""Finds the Megatron-LM checkpoint that a path names, and checks that its format can be read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from megappo.checkpoint.files import MARKER
from megappo.checkpoint.reader import METADATA
from megappo.errors import either, shortened, whole_number
from megappo.observe.json_values import JSONValue
from megappo.observe.plain_files import check_folder, plain_text

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
FORMAT_FILE = "metadata.json"
FORMAT: Mapping[str, JSONValue] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
          "common_backend": "torch", "common_backend_version": 1}  # fmt: skip
_ITERATION = re.compile(r"iter_(\d{7,})")
_ADVICE = "load it with Megatron-LM and save it with --ckpt-format torch_dist"
_TRACKER_CHARACTERS = 100


def is_megatron(path: Path) -> bool:
    """Whether a folder is one of Megatron-LM's, in whatever format: of all iterations, or of one of them."""
    if (path / MARKER).is_file():  # ours
        return False
    return _legacy(path) or any((path / name).is_file() for name in (TRACKER, FORMAT_FILE, METADATA))


def _legacy(folder: Path) -> bool:
    return any(folder.glob("mp_rank_*"))


def find_iteration(path: Path, step: str | None) -> Path:
    """The folder of an iteration: `path` itself, the newest in it, or that of `step`, which may be `release`.

    Raises ValueError where there is none, or where it is of another format than `torch_dist`.
    """
    if step is None:
        folder = path if not (path / TRACKER).is_file() else _newest(path)
    elif not (path / TRACKER).is_file():
        raise ValueError(
            f"{path} is one checkpoint of Megatron-LM; remove what follows the @, or name the folder above"
        )
    else:
        folder = _of_step(path, step)
    check_folder(folder)
    _require_format(folder)
    return folder


def _said(path: Path) -> str:
    """The text of a file. Raises ValueError where it cannot be read."""
    try:
        return plain_text(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; fetch the checkpoint again") from error


def _newest(path: Path) -> Path:
    said = _said(path / TRACKER)[:_TRACKER_CHARACTERS].strip()
    if said != RELEASE and whole_number(said) is None:
        raise ValueError(f"{path / TRACKER} says '{said}', must be a number or {RELEASE}; write the iteration there")
    return _of_step(path, said)


def _of_step(path: Path, step: str) -> Path:
    number = whole_number(step)
    folder = path / (RELEASE if step == RELEASE else f"iter_{-1 if number is None else number:07d}")
    if folder.is_dir():
        return folder
    names = sorted(p.name for p in path.iterdir() if p.is_dir())
    there = [str(int(found[1])) for name in names if (found := _ITERATION.fullmatch(name))]
    there += [RELEASE] if RELEASE in names else []
    known = f"there is {either(there)}" if there else "there is none"
    raise ValueError(f"{path} holds no checkpoint of iteration '{shortened(step)}'; {known}; give one that is there")


def _require_format(folder: Path) -> None:
    """Raise ValueError for a checkpoint that was written with another `--ckpt-format`, or by another program."""
    if _legacy(folder):
        raise ValueError(f"{folder} is in Megatron-LM's format torch, a file for each rank; {_ADVICE}")
    path = folder / FORMAT_FILE
    if not path.is_file():
        if (folder / METADATA).is_file():
            raise ValueError(f"{folder} is in Megatron-LM's format fsdp_dtensor or torch_dcp; {_ADVICE}")
        raise ValueError(f"{folder} holds no {FORMAT_FILE}, so that it was never finished; give another iteration")
    try:
        said = json.loads(_said(path))
        name, version = said["sharded_backend"], said["sharded_backend_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} does not name a format ({error!r}); fetch the checkpoint again") from error
    wanted = FORMAT["sharded_backend"], FORMAT["sharded_backend_version"]
    if (name, version) != wanted:
        raise ValueError(
            f"{folder} is in format {name!s:.40} {version!s:.40}, not in {wanted[0]} {wanted[1]}; {_ADVICE}"
        )
