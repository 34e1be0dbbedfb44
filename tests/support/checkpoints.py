"""Small checkpoints of known numbers.

`python -m tests.support.checkpoints` packs one that the installed torch writes into
`tests/checkpoint/archives/torch-<version>.tar.xz`, for the tests of other versions to read.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megappo.megatron  # noqa: F401 - prepares Megatron-Core for this machine
from megappo.checkpoint.randomness import random_states, seed_generators
from megappo.checkpoint.writer import CheckpointWriter, Snapshot
from megappo.config.schema import CheckpointSettings
from megappo.runtime.process import Runtime
from tests.support.places import ROOT

ARCHIVES = ROOT / "tests" / "checkpoint" / "archives"
SHAPES = {"actor.weight.a": (64, 8), "critic.weight.b": (64, 8)}


def snapshot(step: int, reward: float = 0.0) -> Snapshot:
    """Tensors full of the step's number."""
    from megatron.core.dist_checkpointing import ShardedTensor

    shards = {
        key: ShardedTensor.from_rank_offsets(key, torch.full(shape, float(step))) for key, shape in SHAPES.items()
    }
    content = {
        "trainer": {"step": step},
        "metrics": {"reward/mean": reward, "x": "nan"},
        "versions": {"torch": str(torch.__version__)},
    }
    return Snapshot(step, shards, {"random": random_states()}, content)


def write(directory: Path, runtime: Runtime, *steps: int, **settings: Any) -> None:
    """One checkpoint after the other, as a run does it."""
    writer = CheckpointWriter(directory, CheckpointSettings(**settings), runtime, 60)
    for step in steps:
        writer.save(snapshot(step, reward=-abs(step - 2)), wait=False)
    writer.wait()


def pack() -> None:
    """Write the archive of the installed torch."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    version = str(torch.__version__).partition("+")[0]
    with tempfile.TemporaryDirectory() as folder:
        seed_generators(3, 0)
        write(Path(folder), Runtime(0, 1, 0, torch.device("cpu")), 7)
        with tarfile.open(ARCHIVES / f"torch-{version}.tar.xz", "w:xz") as archive:
            archive.add(Path(folder) / "step-000007", "step-000007")
    dist.destroy_process_group()


if __name__ == "__main__":
    pack()
