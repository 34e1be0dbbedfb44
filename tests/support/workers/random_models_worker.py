"""Build random models, compute log-probabilities, and apply one update; see test_random_models.py.

Usage (under torchrun): random_models_worker.py CASES.json FOUND.json
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import save_file

from megappo.config import derive_run, load_config, resolve
from megappo.megatron.heads import LogprobHead
from megappo.megatron.placed import announce, place
from megappo.megatron.schedule import PackedBatch
from megappo.ppo.assembly.models import ModelBuilder
from megappo.reshard.stream import WeightStream
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import all_gather_objects
from megappo.types import Samples
from tests.support.workers import answer


def minus_sum_of_logprobs(
    head: LogprobHead, hidden_t1H: torch.Tensor, batch: PackedBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return minus the sum of the log-probabilities of all response tokens."""
    logprob_N, _ = head(hidden_t1H, batch)
    loss = -logprob_N.sum() * (not batch.is_filler)
    count = torch.tensor(float(len(batch.labels_N)), dtype=torch.float64)
    return loss, {"loss": loss.detach().double(), "count": count}


def samples_of(case: dict[str, Any], runtime: Runtime) -> Samples:
    """Return every second sample for each of two ranks."""
    mine = list(range(len(case["tokens"])))[runtime.rank :: runtime.world_size]
    return Samples(
        torch.tensor(mine),
        tuple(torch.tensor(case["tokens"][i]) for i in mine),
        torch.tensor([case["responses"][i] for i in mine]),
    )


def run(case: dict[str, Any], runtime: Runtime) -> list[list[float]]:
    """Return the log-probabilities of all samples before the update. Rank 0 saves the updated weights."""
    config = resolve(load_config(case["config"], case["overrides"]), on_cuda=False)
    builder = ModelBuilder(config, derive_run(config, runtime.world_size), runtime, roles=("actor",))
    role = builder.actor()
    announced = announce(samples_of(case, runtime), runtime.device)
    batch = place(role, announced, [frozenset(range(len(case["tokens"])))])
    logprob_BR = batch.forward()
    update = batch.update(0, minus_sum_of_logprobs)
    assert update.applied, update
    weights = {name: tensor.clone() for name, tensor in WeightStream(role, 1 << 20)}
    if runtime.is_main:
        save_file(weights, case["out"])
    rows = zip(batch.samples.sample_ids_B.tolist(), logprob_BR, batch.samples.response_lengths_B.tolist(), strict=True)
    gathered = all_gather_objects({i: row[:n].tolist() for i, row, n in rows})
    merged = {i: row for part in gathered for i, row in part.items()}
    return [merged[i] for i in sorted(merged)]


if __name__ == "__main__":
    answer(lambda request, runtime: [run(case, runtime) for case in request["cases"]])
