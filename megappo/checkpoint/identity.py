"""Digests that say whether a model is still the one a run began with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.runtime import Runtime

_WITHOUT_MEANING = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")


def architecture_digest(folder: Path) -> str:
    """sha256 of a model folder's config.json without what does not change the model."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = {name: value for name, value in content.items() if name not in _WITHOUT_MEANING}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def weights_digest(named_tensors: Iterable[tuple[str, Tensor]], runtime: Runtime) -> str:
    """sha256 over whole tensors and their names, the same for every layout; a collective of the world.

    Every rank sees all tensors and hashes its share of them.
    """
    own: dict[str, str] = {}
    for number, (name, tensor) in enumerate(named_tensors):
        if number % runtime.world_size == runtime.rank:
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            own[name] = hashlib.sha256(data.data).hexdigest()
    gathered: list[dict[str, str]] = [{} for _ in range(runtime.world_size)]
    dist.all_gather_object(gathered, own)
    whole = {name: digest for part in gathered for name, digest in part.items()}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
