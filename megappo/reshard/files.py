"""Finds the files of a Hugging Face folder that hold its weights, one decision for all readers; and refuses weights
that are not finite."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from megappo.config.folder_texts import read_object
from megappo.errors import link_to_nothing, shortened, show

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def tensor_files(folder: Path) -> dict[str, str]:
    """The file of each tensor, by the index; empty where all are in `SINGLE`.

    Where there are both, the single file is the model, as in transformers 5.19: the index may belong to an older save,
    whether or not its shards are still there. Raises ValueError where there is neither, and for an unusable index.
    """
    path = folder / INDEX
    if (folder / SINGLE).is_file():
        return {}
    if not path.exists():
        if link := link_to_nothing(folder / SINGLE) or link_to_nothing(path):
            raise ValueError(link)
        raise ValueError(f"{folder} holds no {SINGLE}; save the model as safetensors, or use model.init: random")
    found = read_object(path).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{path} is no index of safetensors, its weight_map is {show(found)}; fetch or save it again")
    for tensor, file in found.items():
        if not isinstance(file, str) or not _is_inside(file) or not (folder / file).is_file():
            link = link_to_nothing(folder / file) if isinstance(file, str) and _is_inside(file) else ""
            raise ValueError(
                link
                or f"{path} names {show(file)} as the file of {shortened(tensor)}, and {folder} has no such file; "
                "fetch or save the model again"
            )
    return found


def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in file


def counted_files(folder: Path) -> list[Path]:
    """The weight files of a folder for another program: the files in `tensor_files`, or all safetensors if the folder
    has no index and no single file. Raises ValueError for an unusable index."""
    links = [link_to_nothing(folder / name) for name in (SINGLE, INDEX)]
    if not (folder / SINGLE).is_file() and not (folder / INDEX).is_file() and not any(links):
        return sorted(folder.glob("*.safetensors"))
    return [folder / file for file in sorted(set(tensor_files(folder).values())) or [SINGLE]]


class NotFiniteError(ValueError):
    """A file holds a weight that is not a finite float32; only the rank that reads it notices."""


def finite(part: Tensor, name: str, path: Path) -> Tensor:
    """Return a part that was read of a file's tensor. Raises NotFiniteError where it holds a value that is not a finite
    float32."""
    import torch

    if not part.numel():
        return part
    ends = [end.float().item() for end in torch.aminmax(part)]  # in one pass and without a copy, and nan passes through
    strange = next((end for end in ends if not math.isfinite(end)), None)
    if strange is not None:
        raise NotFiniteError(
            f"tensor '{name}' in {path} holds {strange}, must be finite; fetch or save the model again, or use another "
            "checkpoint of it"
        )
    return part
