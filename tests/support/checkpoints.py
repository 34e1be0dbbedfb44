"""Small checkpoints with known numbers.

`python -m tests.support.checkpoints` writes a checkpoint with the installed torch to
`tests/checkpoint/archives/torch-<version>.tar.xz`. The tests of other versions read this archive.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import megappo.megatron  # noqa: F401 - prepares Megatron-Core for this machine
from megappo.checkpoint.identity import architecture_digest, architecture_fields
from megappo.checkpoint.randomness import random_states, seed_generators
from megappo.checkpoint.writer import CheckpointWriter, Snapshot
from megappo.config import load_config
from megappo.config.schema import CheckpointSettings
from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import model_parameters, shard_shape
from megappo.families.weights import read_shard
from megappo.models.model_files import read_architecture
from megappo.reshard.sources import SafetensorsSource
from megappo.runtime.process import Runtime
from tests.support.models import VOCAB, write_model
from tests.support.places import BASE, ROOT, TINY

ARCHIVES = ROOT / "tests" / "checkpoint" / "archives"
SHAPES = {"actor.weight.a": (64, 8), "critic.weight.b": (64, 8)}
TRACES: list[str] = []


def leave_a_trace(where: str) -> None:
    TRACES.append(where)


CALL = f"{__name__}.leave_a_trace"


class Payload:
    """A payload whose pickle calls a function when it is loaded."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return leave_a_trace, (self.where,)


def snapshot(step: int, reward: float = 0.0) -> Snapshot:
    """Return a snapshot in which every number is the step."""
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
    """Write the checkpoints of several steps in sequence, as in a run."""
    writer = CheckpointWriter(directory, CheckpointSettings(**settings), runtime, 60)
    for step in steps:
        writer.save(snapshot(step, reward=-abs(step - 2)), wait=False)
    writer.wait()


def stored(folder: Path, arch: ArchitectureConfig) -> Iterator[tuple[str, Tensor]]:
    """Return the weights of a folder with the names and shapes of the checkpoint of an actor."""
    source, whole = SafetensorsSource(folder, arch), load_file(folder / "model.safetensors")
    for parameter in model_parameters(arch):
        for name, parts in parameter.stored.items():
            tensor = whole[parts[0]]
            if parameter.kind == "qkv":
                tensor = read_shard(
                    source, arch, parameter, torch.empty(shard_shape(arch, parameter, 1, VOCAB)), 0, 1, VOCAB
                )
            yield f"actor.weight.{name}", tensor


def one_step_run(root: Path) -> Path:
    """Write `root` with a `model`, and a `run` whose checkpoint of step 1 contains the weights of the model."""
    model = write_model(root / "model", "llama", 3, num_hidden_layers=2)
    arch = read_architecture(model)
    config = load_config(BASE, [f"model.path={model}", f"model.tokenizer={TINY}", "critic=null"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    content = {
        "trainer": {"step": 1}, "metrics": {}, "versions": {"torch": str(torch.__version__)},
        "settings": config.model_dump(mode="json"), "identity": {"model": architecture_digest(model)},
        "architectures": {"actor": architecture_fields(arch)},
    }  # fmt: skip
    from megatron.core.dist_checkpointing import ShardedTensor

    shards = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in stored(model, arch)}
    runtime = Runtime(0, 1, 0, torch.device("cpu"))
    writer = CheckpointWriter(root / "run/checkpoints", CheckpointSettings(), runtime, 60)
    writer.save(Snapshot(1, shards, {"random": random_states()}, content), wait=True)
    dist.destroy_process_group()
    (root / "run/config.yaml").write_text("{}")
    return root


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
