"""Actual and planned bytes of the checkpoint of a run."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megappo.config import load_config
from megappo.plan.here import this_machine
from megappo.plan.planner import make_plan, read_models


def written_and_planned_bytes(run: Path, step: int, ranks: int) -> tuple[int, float]:
    """Return the bytes of all tensors in the checkpoint of a step, and `Stopping.checkpoint_bytes` for the settings
    of the run."""
    entries = (
        dcp.FileSystemReader(run / "checkpoints" / f"step-{step:06d}").read_metadata().state_dict_metadata.values()
    )
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    written = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors)
    config = load_config(run / "config.yaml")
    return written, make_plan(config, read_models(config, None).models, this_machine(), ranks).stopping.checkpoint_bytes
