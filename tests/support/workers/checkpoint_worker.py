"""Write the roles of a configuration as checkpoints: before and after an update, and after loading other checkpoints;
see test_checkpoint_layouts.py.

Usage (under torchrun): checkpoint_worker.py CASE.json FOUND.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megappo.checkpoint.randomness import random_states
from megappo.checkpoint.shards import load_shards, role_shards, role_updates
from megappo.checkpoint.writer import CheckpointWriter, Snapshot
from megappo.config import derive_run, load_config, resolve
from megappo.config.schema import CheckpointSettings
from megappo.megatron.placed import announce, place
from megappo.ppo.assembly.components import RunComponents, assemble
from megappo.runtime.process import Runtime
from megappo.types import Samples
from tests.support.rewards import without_reward_workers
from tests.support.workers import answer_of_all_ranks
from tests.support.workers.plan_worker import SumOfOutputs


def samples_of_rank(case: dict[str, Any], runtime: Runtime) -> Samples:
    """Return the samples of this rank. All samples have the same length, and each sample is the same on any layout."""
    mine = torch.arange(runtime.rank, case["samples"], runtime.world_size)
    sequences = tuple(
        torch.randint(2, 16, (case["sequence_tokens"],), generator=torch.Generator().manual_seed(int(number)))
        for number in mine
    )
    return Samples(mine, sequences, torch.full(mine.shape, case["response_tokens"]))


def write(parts: RunComponents, writer: CheckpointWriter, step: int) -> dict[str, int]:
    """Write a checkpoint of the roles and return the number of updates of each role."""
    shards = {key: shard for role in parts.trained for key, shard in role_shards(role).items()}
    content = {"trainer": {"step": step}, "metrics": {}, "versions": {"torch": str(torch.__version__)}}
    writer.save(Snapshot(step, shards, {"random": random_states()}, content), wait=True)
    return {role.placement.name: role_updates(role) for role in parts.trained}


def written_updates(case: dict[str, Any], runtime: Runtime) -> list[Any]:
    """Write all checkpoints, and return the numbers of updates of each one."""
    config = resolve(load_config(case["config"], case["overrides"]), on_cuda=False)
    with without_reward_workers():
        parts = assemble(config, derive_run(config, runtime.world_size), runtime)
    writer = CheckpointWriter(Path(case["out"]), CheckpointSettings(keep_last=9), runtime, 60)
    updates = [write(parts, writer, 1)]
    announced = announce(samples_of_rank(case, runtime), runtime.device)
    for role in parts.trained:
        place(role, announced, [range(case["samples"])]).update(0, SumOfOutputs(None))
    updates.append(write(parts, writer, 2))
    for step, (folder, applied) in enumerate(case["read"], 3):
        load_shards(Path(folder), parts.trained, applied)
        updates.append(write(parts, writer, step))
    parts.close()
    return updates


if __name__ == "__main__":
    answer_of_all_ranks(written_updates)
