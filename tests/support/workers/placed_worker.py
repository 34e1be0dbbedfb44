"""Place samples on ranks of many grids, and count the transfers of a whole step; see test_placed.py.

Usage (under torchrun, four processes): placed_worker.py RUN_DIRECTORY
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.config import derive_run, load_config, resolve
from megappo.config.grid import Grid
from megappo.config.schema import RuntimeSettings
from megappo.megatron.build import BuildOptions
from megappo.megatron.packing import MicrobatchPlan, SampleCost
from megappo.megatron.placed import PlacedBatch, announce, place
from megappo.megatron.roles import AbsentRole, Placement
from megappo.megatron.schedule import PlacedSample
from megappo.models.model_files import read_architecture
from megappo.ppo.assembly.components import assemble
from megappo.ppo.reports.reporting import Reporter
from megappo.ppo.trainer import Trainer
from megappo.runtime.process import Runtime, start_runtime
from megappo.types import Samples

SAMPLES = 30
MODEL = Path("configs/models/tiny_arithmetic")
GRIDS = (
    Grid((0, 1, 2, 3), 1, 1), Grid((0, 1, 2, 3), 2, 1), Grid((0, 1, 2, 3), 2, 2), Grid((0, 1, 2, 3), 1, 2),
    Grid((0, 1, 2, 3), 2, 1, 4), Grid((1, 2, 3), 1, 1), Grid((2,), 1, 1),
)  # fmt: skip


class Echo(AbsentRole):
    """A role without a model. Its output is the response tokens."""

    def run_forward(self, plan: MicrobatchPlan, samples: Mapping[int, PlacedSample]) -> dict[int, Tensor]:
        place = self.placement.grid.place(self.runtime.rank)
        if place is None or self.runtime.rank != self.placement.grid.output_rank(place[0]):
            return {}
        mine = [i for i, replica in plan.replica_of().items() if replica == place[0]]
        return {i: samples[i].tokens_T[-samples[i].response_tokens :].float() for i in mine}


def sample(sample_id: int) -> tuple[Tensor, int]:
    """Return tokens and response length, which depend only on the id."""
    g = torch.Generator().manual_seed(sample_id)
    prompt, response = (int(torch.randint(1, 20, (), generator=g)) for _ in range(2))
    return torch.randint(0, 99, (prompt + response,), generator=g), response


def samples_of(rank: int) -> Samples:
    """Return the samples of a rank. Rank 3 has none, and the ids of the other ranks are unordered."""
    ids = [i for i in reversed(range(SAMPLES)) if i % 3 == rank]
    sequences = [sample(i) for i in ids]
    lengths = torch.tensor([n for _, n in sequences], dtype=torch.int64)
    return Samples(torch.tensor(ids, dtype=torch.int64), tuple(s for s, _ in sequences), lengths)


def fields_of(samples: Samples) -> dict[str, Tensor]:
    """Return two numbers per response token, with NaN as padding."""
    lengths_B = samples.response_lengths_B
    tokens_R = torch.arange(int(lengths_B.max()) if len(lengths_B) else 0)
    by_id_BR = samples.sample_ids_B[:, None] * 100.0 + tokens_R
    by_id_BR[tokens_R[None] >= lengths_B[:, None]] = float("nan")
    return {"up": by_id_BR, "down": -by_id_BR}


def check_grid(grid: Grid, runtime: Runtime) -> None:
    """Check that samples are on the ranks of their plans and on no other ranks, and that outputs return to the
    source."""
    placement = Placement("echo", grid, budget_tokens=100, microbatch_multiple=grid.pp, cost=SampleCost(1, 0))
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0)).tolist()
    minibatches = [order[:11], order[11:]]
    samples = samples_of(runtime.rank)
    arch, options = read_architecture(MODEL), BuildOptions(torch.float32, runtime.device, padded_vocab=16)
    role = Echo(placement, arch, options, runtime)
    batch = place(role, announce(samples, runtime.device), minibatches).with_fields(fields_of(samples))
    position = grid.place(runtime.rank)
    planned: set[int] = set()
    if position is not None:
        plans = (batch.forward_plan, *batch.update_plans)
        planned = {i for plan in plans for microbatch in plan.replicas[position[0]] for i in microbatch.sample_ids}
    assert batch.local_samples.keys() == planned, (grid, runtime.rank)
    for i, placed in batch.local_samples.items():
        tokens_T, response = sample(i)
        assert placed.sample_id == i and torch.equal(placed.tokens_T, tokens_T) and placed.response_tokens == response
        assert torch.equal(placed.fields["up"], 100.0 * i + torch.arange(response))
        assert torch.equal(placed.fields["down"], -placed.fields["up"])
    output_BR = batch.forward()
    for output_R, tokens_T, n in zip(output_BR, samples.sequences, samples.response_lengths_B.tolist(), strict=True):
        assert torch.equal(output_R[:n], tokens_T[-n:].float()) and not output_R[n:].any()


@contextmanager
def counted() -> Iterator[Counter[torch.dtype]]:
    """Count all-to-all calls by the dtype of the input."""
    counts: Counter[torch.dtype] = Counter()
    send = dist.all_to_all_single

    def count(output: Tensor, input: Tensor, *rest: Any, **more: Any) -> Any:
        counts[input.dtype] += 1
        return send(output, input, *rest, **more)

    dist.all_to_all_single = count
    yield counts
    dist.all_to_all_single = send


def check_step(directory: str, runtime: Runtime) -> None:
    """Check a step of two minibatches in two epochs. Tokens are sent to actor and critic. Actor, critic and reference
    return their results. The numbers per token are sent to actor and critic. No objects of the step remain."""
    overrides = [
        f"run.directory={directory}", "actor.layout={tensor_parallel: 2}", "critic.layout={first_rank: 1, ranks: 2}",
        "reference={}", "algorithm.kl_in_loss={coef: 0.1}", "rollout.prompts_per_step=10",
        "actor.minibatch_sequences=40", "critic.minibatch_sequences=40", "logging={tensorboard: false, console: quiet}",
    ]  # fmt: skip
    config = resolve(load_config("configs/quickstart.yaml", overrides), on_cuda=False)
    parts = assemble(config, derive_run(config, runtime.world_size), runtime)
    trainer = Trainer(parts, Reporter(config, parts.derived, runtime))
    trainer.sync_weights()
    for step in (1, 2):
        trainer.step = step
        with counted() as counts:
            trainer.ppo_step()
        assert trainer.metrics["actor/updates"] == trainer.metrics["critic/updates"] == 4
        assert counts == {torch.int64: 2, torch.float32: 5}, counts
        gc.collect()
        assert not [x for x in gc.get_objects() if isinstance(x, PlacedBatch | PlacedSample)]
    parts.close()


def main() -> None:
    with start_runtime(RuntimeSettings(collective_timeout_seconds=120)) as runtime:
        for grid in GRIDS:
            check_grid(grid, runtime)
        check_step(sys.argv[1], runtime)


if __name__ == "__main__":
    main()
