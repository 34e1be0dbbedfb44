"""Which files of a Hugging Face folder hold its weights: one decision for all who read or count them."""

from __future__ import annotations

import json
from pathlib import Path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def tensor_files(folder: Path) -> dict[str, str]:
    """The file of each tensor, by the index; empty where all are in `SINGLE`.

    Where there are both, the single file is the model, as for transformers (5.19): the index may be of an older save
    whose shards are still there, or gone. Raises ValueError where there is neither, and for an index that is none.
    """
    path = folder / INDEX
    if (folder / SINGLE).is_file():
        return {}
    if not path.exists():
        raise ValueError(f"{folder} holds no {SINGLE}; save the model as safetensors, or use model.init: random")
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no index of safetensors ({error!r}); fetch or save it again") from error


def counted_files(folder: Path) -> list[Path]:
    """Those of a folder that somebody else reads: what `tensor_files` says, or all safetensors where it has nothing to
    say. Raises ValueError for an index that is none."""
    if not (folder / SINGLE).is_file() and not (folder / INDEX).is_file():
        return sorted(folder.glob("*.safetensors"))
    return [folder / file for file in sorted(set(tensor_files(folder).values())) or [SINGLE]]
