#!/usr/bin/env python3
"""Measure the CPU cost of a step per rank outside the models, for different worlds and batches.

Usage: python -m benchmarks.control_plane CONFIG [--worlds 2 4 8] [--samples 512 2048] [--tokens 256] [--json FILE]
       python -m benchmarks.control_plane CONFIG --simulate [--worlds 64 320 1024] [--samples 1024 8192] [--tokens N]

The program runs the stages of the trainer from finished responses to the end of the updates. Models of actor, critic
and reference return immediately. The stages include announcements and placement of samples, their transfer, results
and per-token numbers, plans of microbatches, advantages, whitening, reports of updates, and metrics. Worlds of
`--worlds` processes communicate with gloo on this machine. With `--simulate`, this process simulates the first, a
middle and the last rank of each world in turn, and the data of other ranks is generated. A role has the
configuration's layout if the world is large enough.

The program prints CPU seconds of the slowest rank, and the maximum of received bytes and messages over ranks. A
collective is one message. An all-to-all has one message for each rank that sends data. The program also prints a fit
of the CPU seconds, and the largest share of a stage in the step that `megappo plan` predicts for the configuration.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from benchmarks.report import parser_of, print_table, versions, write_json
from megappo.config import Config, load_config
from megappo.config.grid import Grid
from megappo.data import Cursor
from megappo.engines.absent import AbsentEngine
from megappo.families.declaration import ArchitectureConfig
from megappo.families.flops import SampleCost
from megappo.megatron.build import BuildOptions
from megappo.megatron.packing import MicrobatchPlan
from megappo.megatron.roles import Placement, Role, TrainedRole, Update
from megappo.megatron.schedule import PlacedSample, Task
from megappo.observe.ends import End
from megappo.plan.planner import default_machine, make_plan, read_models
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.reports.reporting import Reporter
from megappo.ppo.trainer import Trainer
from megappo.runtime.process import Runtime
from megappo.types import Rollouts

ROOT = Path(__file__).resolve().parents[1]

STAGES = ("forward", "advantages", "update_critic", "update_actor", "report")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Size:
    """World size with its batch."""

    world: int
    samples: int
    tokens: int
    """Tokens of the longest sample, half of which are response tokens. Other samples have at least half of this
    number."""


@dataclass
class Spent:
    """Costs of one rank in a step."""

    seconds: dict[str, float]
    """CPU seconds by stage."""
    received_bytes: int = 0
    messages: int = 0

    @property
    def total(self) -> float:
        """CPU seconds of all stages."""
        return sum(self.seconds.values())


class Echo(TrainedRole):
    """Role without a model, which returns immediately."""

    def __init__(self, placement: Placement, arch: ArchitectureConfig, runtime: Runtime) -> None:
        options = BuildOptions(torch.float32, runtime.device, padded_vocab=arch.vocab_size)
        Role.__init__(self, placement, arch, options, runtime)

    def rest(self) -> None:
        """Do nothing: the role has no tensors to move."""

    def run_forward(self, plan: MicrobatchPlan, samples: Mapping[int, PlacedSample]) -> dict[int, Tensor]:
        """Return zeros on the rank that returns results."""
        grid, rank = self.placement.grid, self.runtime.rank
        replica = grid.replica_of(rank)
        if replica is None or rank != grid.output_rank(replica):
            return {}
        mine = (i for i, of_sample in plan.replica_of().items() if of_sample == replica)
        return {i: torch.zeros(samples[i].response_tokens) for i in mine}

    def run_update(self, plan: Any, samples: Any, task: Task, stop_above: Any) -> Update:
        """Return an update without changes."""
        return Update(True, True, {"loss": 0.0, "count": 1.0, "ppo_kl_k3": 0.0}, 1.0, 1e-6)


def length(sample_id: int, size: Size) -> int:
    """Return the number of tokens of a sample. All ranks return the same number."""
    return size.tokens // 2 + sample_id * 7919 % (size.tokens // 2)


def rollouts(rank: int, size: Size, group: int) -> Rollouts:
    """Return the responses of a rank. Samples are assigned in order."""
    ids = torch.arange(rank * size.samples // size.world, (rank + 1) * size.samples // size.world)
    lengths = [length(int(i), size) for i in ids]
    responses_B = torch.tensor([n // 2 for n in lengths], dtype=torch.int64)
    tokens_R = torch.arange(int(responses_B.max()) if len(ids) else 0)
    mask_BR, nothing_B = tokens_R[None] < responses_B[:, None], torch.zeros(len(ids), dtype=torch.int64)
    return Rollouts(
        sample_ids_B=ids, sequences=tuple(torch.zeros(n, dtype=torch.int64) for n in lengths),
        response_lengths_B=responses_B, prompts=(), group_ids_B=ids // group,
        engine_logprob_BR=torch.zeros(mask_BR.shape), response_mask_BR=mask_BR, ends=(End.COMPLETE,) * len(nothing_B),
        weight_versions_B=nothing_B, responses=(), raw_responses=(), special_tokens_B=nothing_B,
    )  # fmt: skip


def placement(name: str, config: Config, size: Size) -> Placement:
    """Return a placement with the configuration's layout, limited by the number of ranks."""
    settings, left = config.trained[name], size.world
    cut = {}
    for axis in ("tensor", "context", "pipeline"):
        cut[axis] = min(getattr(settings.layout, f"{axis}_parallel"), left)
        left //= cut[axis]
    grid = Grid(range(size.world), cut["tensor"], cut["pipeline"], 1, cut["context"])
    budget = max(settings.microbatch_budget_tokens, 2 * size.tokens)
    return Placement(name, grid, budget, 1, SampleCost(1 << 24, 1))


def make_trainer(config: Config, runtime: Runtime, size: Size) -> Trainer:
    """Build the trainer of a run with `Echo` roles."""
    models = read_models(config, ROOT / "configs" / "models").models
    actor = Echo(placement("actor", config, size), models.actor, runtime)
    critic = Echo(placement("critic", config, size), models.critic, runtime) if config.critic is not None else None
    components: dict[str, Any] = dict.fromkeys(RunComponents.__dataclass_fields__)
    components |= {
        "config": config,
        "derived": type("Derived", (), {"batch_sequences": size.samples, "steps": 100}),
        "runtime": runtime,
        "actor": actor,
        "critic": critic,
        "reference": actor if config.reference is not None else None,
        "cursor": Cursor(size.samples, 0, False, fingerprint=""),
        "engine": AbsentEngine(),
        "stop_token_ids": (),
    }
    parts = RunComponents(**components)
    trainer = Trainer(parts, Reporter(config, parts.derived, runtime))
    trainer.step = 1 + (config.critic.warmup_steps if config.critic is not None else 0)
    return trainer


def one_step(config: Config, runtime: Runtime, size: Size) -> Spent:
    """Run the stages of a step after its rollout."""
    own = rollouts(runtime.rank, size, config.rollout.samples_per_prompt)
    trainer = make_trainer(config, runtime, size)
    spent = Spent({})
    gc.collect()
    gc.freeze()  # a scan of imported objects would count as cost of a stage

    def timed(stage: str, work: Any) -> Any:
        start = time.process_time()
        result = work()
        spent.seconds[stage] = time.process_time() - start
        return result

    try:
        with counted(spent, runtime):
            placed, scored = timed("forward", lambda: trainer.forward(own, torch.zeros(len(own.sample_ids_B))))
            experience = timed("advantages", lambda: trainer.estimate_advantages(scored))
            timed("update_critic", lambda: trainer.update_critic(placed, experience))
            timed("update_actor", lambda: trainer.update_actor(placed, experience))
            timed("report", lambda: trainer.reporter.end_step({"step_tokens": 1.0, "step_samples": 1.0}, experience))
    finally:
        trainer.reporter.close()
        gc.unfreeze()
    return spent


@contextlib.contextmanager
def counted(spent: Spent, runtime: Runtime) -> Iterator[None]:
    """Count the received bytes and messages of this rank. Object collectives use the counted collectives."""
    others = runtime.world_size - 1

    def n_bytes(tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    def exchanged(really: Any, output: Tensor, input: Tensor, sizes: Any, *rest: Any, **more: Any) -> Any:
        own = sizes[runtime.rank] * output.element_size()
        spent.received_bytes += n_bytes(output) - own
        spent.messages += sum(n > 0 for rank, n in enumerate(sizes) if rank != runtime.rank)
        return really(output, input, sizes, *rest, **more)

    def collective(really: Any, times: float, position: int, *args: Any, **more: Any) -> Any:
        spent.received_bytes += int(times * n_bytes(args[position]))
        spent.messages += 1
        return really(*args, **more)

    kinds = {"all_reduce": (2.0, 0), "all_gather": (others, 1), "broadcast": (1.0, 0)}
    with contextlib.ExitStack() as patches:
        for module in (dist, distributed_c10d):
            send = partial(exchanged, dist.all_to_all_single)
            patches.enter_context(patch.object(module, "all_to_all_single", send))
            for name, (times, position) in kinds.items():
                count = partial(collective, getattr(distributed_c10d, name), times, position)
                patches.enter_context(patch.object(module, name, count))
        yield


@contextlib.contextmanager
def simulated(rank: int, size: Size) -> Iterator[Runtime]:
    """Run this process as one rank of a simulated world. The messages of other ranks are generated."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    homes = [range(r * size.samples // size.world, (r + 1) * size.samples // size.world) for r in range(size.world)]
    tables = [torch.tensor([[i, n := length(i, size), n // 2] for i in ids]).view(-1, 3) for ids in homes]

    def all_ranks(local: Tensor) -> list[Tensor]:
        dist.all_gather(list(torch.empty(size.world, *local.shape, dtype=local.dtype)), local)
        return tables if local.shape[1] == 3 else [table[:, [0, 2]] for table in tables]

    def sent_nothing(output: Tensor, *_args: Any, **_more: Any) -> None:
        output.zero_()

    def broadcast_value(value: Any, **_where: Any) -> Any:
        shared = [value]
        dist.broadcast_object_list(shared, src=rank)
        return value

    with contextlib.ExitStack() as patches:
        for module in ("megatron.placed", "ppo.updates"):
            patches.enter_context(patch(f"megappo.{module}.all_gather_varying", all_ranks))
        patches.enter_context(patch.object(dist, "all_to_all_single", sent_nothing))
        patches.enter_context(patch("megappo.megatron.placed.broadcast_object", broadcast_value))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size.world)
        try:
            yield Runtime(rank, size.world, 0, CPU)
        finally:
            dist.destroy_process_group()


def simulate(config: Config, size: Size) -> list[Spent]:
    """Return the costs of the first, a middle and the last rank of a simulated world."""
    costs = []
    for rank in sorted({0, size.world // 2, size.world - 1}):
        with simulated(rank, size) as runtime:
            one_step(config, runtime, size)  # for one-time initialisation
            costs.append(one_step(config, runtime, size))
    return costs


def _process(rank: int, config: Config, sizes: list[Size], folder: str) -> None:
    world = sizes[0].world
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store-{world}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    costs = []
    for size in (sizes[0], *sizes):
        costs.append(asdict(one_step(config, Runtime(rank, world, 0, CPU), size)))
        dist.barrier()
    Path(folder, f"{world}-{rank}.json").write_text(json.dumps(costs[1:]))
    dist.destroy_process_group()


def measure(config: Config, world: int, sizes: list[Size]) -> list[list[Spent]]:
    """Return the costs of every rank in a world of processes, for each size."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(_process, (config, sizes, folder), nprocs=world, start_method="fork")
        of_ranks = [json.loads(Path(folder, f"{world}-{rank}.json").read_text()) for rank in range(world)]
    return [[Spent(**costs[n]) for costs in of_ranks] for n in range(len(sizes))]


def settings(path: str, samples: int, directory: str) -> Config:
    """Load the configuration for `samples` samples per step, with an unchanged number of updates."""
    config = load_config(path)
    per_prompt = min(config.rollout.samples_per_prompt, samples)
    size = config.rollout.batch_sequences
    minibatches = {name: max(1, samples * r.minibatch_sizes(size)[0] // size) for name, r in config.trained.items()}
    overrides = [f"{name}.minibatch_sequences={n}" for name, n in minibatches.items()]
    return load_config(
        path,
        [
            *overrides, f"rollout.prompts_per_step={samples // per_prompt}", f"rollout.samples_per_prompt={per_prompt}",
            f"run.directory={directory}", "run.name=control-plane", "run.epochs=null", "run.steps=100",
            "logging={tensorboard: false, console: quiet}",
        ],
    )  # fmt: skip


def fit(rows: list[tuple[Size, Spent]]) -> dict[str, float]:
    """Fit CPU seconds as a sum of a constant and terms per rank of the world, per sample of the step and per sample
    of a rank.

    The fit is the best least-squares fit over all subsets of terms with nonnegative coefficients.
    """
    names = ("constant", "per rank", "per sample", "per sample of a rank")
    terms = torch.tensor([[1.0, s.world, s.samples, s.samples / s.world] for s, _ in rows], dtype=torch.float64)
    seconds = torch.tensor([[spent.total] for _, spent in rows], dtype=torch.float64)
    fits: dict[float, dict[str, float]] = {}
    for used in (list(u) for n in range(1, 5) for u in itertools.combinations(range(4), n)):
        shares = torch.linalg.lstsq(terms[:, used], seconds).solution
        if bool((shares >= 0).all()):
            error = float((terms[:, used] @ shares - seconds).norm())
            fits[error] = dict(zip((names[i] for i in used), shares.flatten().tolist(), strict=True))
    return dict.fromkeys(names, 0.0) | fits[min(fits)]


def busiest(of_ranks: list[Spent]) -> Spent:
    """Return the seconds of the slowest rank, and the maximum of bytes and messages over ranks."""
    slowest = max(of_ranks, key=lambda spent: spent.total)
    most = (max(spent.received_bytes for spent in of_ranks), max(spent.messages for spent in of_ranks))
    return Spent(slowest.seconds, *most)


def planned_seconds(path: str) -> float:
    """Return the planned seconds of a step on the default machine of plans. The number of ranks is read from the
    first lines of the file."""
    config = load_config(path)
    parts = Path(path).read_text().split("--gpus ", 1)
    gpus = int(parts[1].split()[0]) if len(parts) == 2 else 1
    models = read_models(config, Path(path).parent / "models").models
    return make_plan(config, models, default_machine(config), gpus).step_seconds


def print_rows(rows: list[tuple[Size, Spent]], title: str) -> None:
    """Print the rows as a table."""
    cells = []
    for size, spent in rows:
        seconds = (f"{x:.3f}" for x in (*(spent.seconds[stage] for stage in STAGES), spent.total))
        megabytes = f"{spent.received_bytes / 1e6:.2f}"
        cells.append((str(size.world), str(size.samples), *seconds, megabytes, str(spent.messages)))
    print_table(title, ("ranks", "samples", *STAGES, "all, s", "MB", "messages"), cells, texts=0, width=120)


def main() -> int:
    parser = parser_of(__doc__, has_config=False)
    parser.add_argument("config")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--worlds", type=int, nargs="+")
    parser.add_argument("--samples", type=int, nargs="+")
    parser.add_argument("--tokens", type=int, help="tokens of the longest sample")
    arguments = parser.parse_args()
    simulates = arguments.simulate
    longest = load_config(arguments.config).max_sequence_tokens if simulates else 256
    tokens = arguments.tokens or longest
    all_samples = arguments.samples or ([1024, 8192] if simulates else [512, 2048])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    rows: list[tuple[Size, Spent]] = []
    with tempfile.TemporaryDirectory() as directory:
        for world in arguments.worlds or ([64, 320, 1024] if simulates else [2, 4, 8]):
            for samples in all_samples:
                size = Size(world, samples, tokens)
                config = settings(arguments.config, samples, directory)
                of_ranks = simulate(config, size) if simulates else measure(config, world, [size])[0]
                rows.append((size, busiest(of_ranks)))
    print_rows(rows, f"a step outside its models, samples of up to {tokens} tokens")
    terms, step = fit(rows), planned_seconds(arguments.config)
    print("CPU seconds: " + " + ".join(f"{seconds:.2e} {name}" for name, seconds in terms.items()))
    share = max(max(spent.seconds.values()) for _, spent in rows) / step
    print(f"largest stage: {100 * share:.2f}% of the planned step of {step:.0f} seconds")
    written = [{**asdict(size), **asdict(spent), "total": spent.total} for size, spent in rows]
    results = {"versions": versions(), "rows": written, "fit": terms, "planned_seconds": step, "share": share}
    write_json(arguments, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
