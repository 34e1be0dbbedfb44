"""Find the weight files of a Hugging Face folder, with one rule for all readers, and reject weights that are not
finite."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from megappo.errors import link_to_nothing, shortened, show
from megappo.files.folder_texts import read_object

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor according to the index. Empty if all tensors are in `SINGLE`.

    If both exist, the single file is the model, as in transformers 5.19. The index may belong to an older save, even
    if its shards exist. Raises ValueError if neither exists, and for an unusable index.
    """
    path = folder / INDEX
    if (folder / SINGLE).is_file():
        return {}
    if not path.exists():
        if link := link_to_nothing(folder / SINGLE) or link_to_nothing(path):
            raise ValueError(link)
        raise ValueError(f"{folder} has no {SINGLE}; save the model as safetensors, or use model.init: random")
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{path} is not an index of safetensors, its weight_map is {show(weight_map)}; fetch or save it again"
        )
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not _is_inside(file) or not (folder / file).is_file():
            link = link_to_nothing(folder / file) if isinstance(file, str) and _is_inside(file) else ""
            raise ValueError(
                link
                or f"{path} lists {show(file)} as the file of {shortened(tensor)}, and {folder} has no such file; "
                "fetch or save the model again"
            )
    return weight_map


def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in file


def counted_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder for another program. The files are those in `tensor_files`, or all
    safetensors if the folder has no index and no single file. Raises ValueError for an unusable index."""
    links = [link_to_nothing(folder / name) for name in (SINGLE, INDEX)]
    if not (folder / SINGLE).is_file() and not (folder / INDEX).is_file() and not any(links):
        return sorted(folder.glob("*.safetensors"))
    return [folder / file for file in sorted(set(tensor_files(folder).values())) or [SINGLE]]


class NotFiniteError(ValueError):
    """A file contains a weight that is not a finite float32. Only the rank that reads the file raises this error."""


def finite(part: Tensor, name: str, path: Path) -> Tensor:
    """Return a part of a tensor of a file. Raises NotFiniteError if the part contains a value that is not a finite
    float32."""
    import torch

    if not part.numel():
        return part
    ends = [end.float().item() for end in torch.aminmax(part)]  # one pass without a copy; nan is propagated
    strange = next((end for end in ends if not math.isfinite(end)), None)
    if strange is not None:
        raise NotFiniteError(
            f"tensor '{name}' in {path} contains {strange}, must be finite; fetch or save the model again, or "
            "use another checkpoint"
        )
    return part
