"""Finds the Megatron-LM checkpoint of a path, and checks its format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from megappo.checkpoint.files import MARKER
from megappo.checkpoint.reader import METADATA
from megappo.errors import either, shortened, whole_number
from megappo.files.json_values import JSONValue
from megappo.files.plain_files import check_folder, plain_text

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
FORMAT_FILE = "metadata.json"
FORMAT: Mapping[str, JSONValue] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
          "common_backend": "torch", "common_backend_version": 1}  # fmt: skip
_ITERATION = re.compile(r"iter_(\d{7,})")
_ADVICE = "load it with Megatron-LM and save it with --ckpt-format torch_dist"
_TRACKER_CHARACTERS = 100


def is_megatron(path: Path) -> bool:
    """Return whether a folder is from Megatron-LM, in any format: with all iterations, or with one iteration."""
    if (path / MARKER).is_file():  # a checkpoint of megappo
        return False
    return _legacy(path) or any((path / name).is_file() for name in (TRACKER, FORMAT_FILE, METADATA))


def _legacy(folder: Path) -> bool:
    return any(folder.glob("mp_rank_*"))


def find_iteration(path: Path, step: str | None) -> Path:
    """Return the folder of an iteration: `path` itself, the newest iteration, or the iteration `step` (or `release`).

    Raises ValueError if the iteration does not exist, or does not have the format `torch_dist`.
    """
    if step is None:
        folder = path if not (path / TRACKER).is_file() else _newest(path)
    elif not (path / TRACKER).is_file():
        raise ValueError(
            f"{path} is a single checkpoint of Megatron-LM; remove the part from the @ on, or name the parent folder"
        )
    else:
        folder = _of_step(path, step)
    check_folder(folder)
    _require_format(folder)
    return folder


def _read_text(path: Path) -> str:
    """Return the text of a file. Raises ValueError if the file cannot be read."""
    try:
        return plain_text(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; fetch the checkpoint again") from error


def _newest(path: Path) -> Path:
    iteration = _read_text(path / TRACKER)[:_TRACKER_CHARACTERS].strip()
    if iteration != RELEASE and whole_number(iteration) is None:
        raise ValueError(
            f"{path / TRACKER} contains '{iteration}', must be a number or {RELEASE}; write the iteration to the file"
        )
    return _of_step(path, iteration)


def _of_step(path: Path, step: str) -> Path:
    number = whole_number(step)
    folder = path / (RELEASE if step == RELEASE else f"iter_{-1 if number is None else number:07d}")
    if folder.is_dir():
        return folder
    names = sorted(p.name for p in path.iterdir() if p.is_dir())
    iterations = [str(int(match[1])) for name in names if (match := _ITERATION.fullmatch(name))]
    iterations += [RELEASE] if RELEASE in names else []
    known = f"existing: {either(iterations)}" if iterations else "the folder has no checkpoint"
    raise ValueError(
        f"{path} contains no checkpoint of iteration '{shortened(step)}'; {known}; name an existing iteration"
    )


def _require_format(folder: Path) -> None:
    """Check the format of a checkpoint. Raises ValueError for another `--ckpt-format`, or for another program."""
    if _legacy(folder):
        raise ValueError(f"{folder} has Megatron-LM's format torch, with one file per rank; {_ADVICE}")
    path = folder / FORMAT_FILE
    if not path.is_file():
        if (folder / METADATA).is_file():
            raise ValueError(f"{folder} has Megatron-LM's format fsdp_dtensor or torch_dcp; {_ADVICE}")
        raise ValueError(f"{folder} contains no {FORMAT_FILE} and is unfinished; name another iteration")
    try:
        content = json.loads(_read_text(path))
        name, version = content["sharded_backend"], content["sharded_backend_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} does not name a format ({error!r}); fetch the checkpoint again") from error
    supported = FORMAT["sharded_backend"], FORMAT["sharded_backend_version"]
    if (name, version) != supported:
        raise ValueError(
            f"{folder} has format {name!s:.40} {version!s:.40}, not {supported[0]} {supported[1]}; {_ADVICE}"
        )
