#!/usr/bin/env python3
"""Compare an update with forward and backward of a bare model.

Usage: [torchrun --nproc-per-node N] benchmarks/update.py CONFIG [key=value ...] [--roles actor critic] [--samples
16]
           [--prompt 43] [--responses 30 | 1-64] [--threads N] [--warmup 1] [--repeat 7] [--json FILE]

One side is an update of a role of the configuration, on all its ranks: packing, forward, loss, backward, gradients,
AdamW. The other side is forward and backward of the same samples in a stock transformers model (`bare_model`),
without an optimizer. Warm-up selects the fastest exact form of this model. Rank 0 computes the bare model with all
threads, and the other ranks wait. Both sides alternate, and each ratio compares the two sides of one round. On cores
with other load, use the ratio of CPU seconds with `--threads 1`: with several threads, the time depends on the
slowest thread. Weights are random. `--responses 1-64` spaces the lengths evenly. The program uses a temporary run
directory.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bare_model import BareModel, Inputs, forms
from benchmarks.report import of_config, parser_of, print_table, refuse, write_json
from megappo.config import Config, ConfigError, derive_run, load_config
from megappo.config.role_models import load_architecture, role_folder
from megappo.preflight.resolved import resolve_for_device
from megappo.runtime.process import Runtime, start_runtime
from megappo.runtime.ranks.objects import all_gather_objects, broadcast_object
from megappo.types import Samples


@dataclass(frozen=True)
class Size:
    """Number and lengths of the samples of one update."""

    samples: int
    prompt: int
    shortest: int
    longest: int

    def draw(self, vocabulary: int) -> list[tuple[Tensor, int]]:
        """Return (tokens, response tokens) of each sample, with evenly spaced lengths. All ranks return the same
        samples."""
        g = torch.Generator().manual_seed(7)
        spread = torch.linspace(self.shortest, self.longest, self.samples).round().long()
        lengths = spread[torch.randperm(self.samples, generator=g)].tolist()
        return [(torch.randint(vocabulary, (self.prompt + n,), generator=g), n) for n in lengths]


@dataclass(frozen=True)
class Row:
    """Seconds of the rounds of one role. Ratios compare the update and the bare model of the same round."""

    role: str
    form: str
    """Name of the bare model's fastest form."""
    update_seconds: list[float]
    bare_seconds: list[float]
    ratios: list[float]
    median_ratio: float
    update_cpu_seconds: list[float]
    """CPU seconds of all threads of all ranks."""
    bare_cpu_seconds: list[float]
    median_cpu_ratio: float
    other_forms: dict[str, float]
    """Median seconds of each form in warm-up; CPU seconds if they are less."""


def local_samples(drawn: Sequence[tuple[Tensor, int]], runtime: Runtime) -> Samples:
    """Return the samples of this rank."""
    ids = range(runtime.rank, len(drawn), runtime.world_size)
    lengths = torch.tensor([drawn[i][1] for i in ids], dtype=torch.int64)
    return Samples(torch.tensor(ids, dtype=torch.int64), tuple(drawn[i][0] for i in ids), lengths)


def our_update(
    name: str, config: Config, runtime: Runtime, drawn: Sequence[tuple[Tensor, int]], targets: Sequence[Tensor]
) -> Callable[[], None]:
    """Build a role of the run. Return a function that updates the role with all samples."""
    from megappo.megatron.placed import announce, place
    from megappo.megatron.schedule import Task
    from megappo.ppo.assembly.methods import find_objective
    from megappo.ppo.assembly.models import ModelBuilder
    from megappo.ppo.updates import LossWeights, PolicyTask, ValueTask

    builder = ModelBuilder(config, derive_run(config, runtime.world_size), runtime, roles=(name,))
    role = builder.actor() if name == "actor" else builder.critic()
    assert role is not None
    samples = local_samples(drawn, runtime)
    batch = place(role, announce(samples, runtime.device), [range(len(drawn))])
    scored_BR = batch.forward()
    mask_BR = torch.arange(scored_BR.shape[1])[None] < samples.response_lengths_B[:, None]
    targets_BR = torch.zeros_like(scored_BR)
    for row_R, sample_id in zip(targets_BR, samples.sample_ids_B.tolist(), strict=True):
        row_R[: len(targets[sample_id])] = targets[sample_id]
    weights = LossWeights(config.algorithm.loss_aggregation, sum(n for _, n in drawn), len(drawn), 1)
    task: Task
    if name == "actor":
        task = PolicyTask(find_objective(config.algorithm, 0.0), weights)
        fields = batch.with_fields({"old_logprob": scored_BR, "advantages": targets_BR, "mask": mask_BR})
    else:
        assert config.critic is not None
        task = ValueTask(config.critic.value_clip, weights)
        fields = batch.with_fields({"old_values": scored_BR, "returns": targets_BR, "mask": mask_BR})

    def update() -> None:
        if not fields.update(0, task).applied:
            raise RuntimeError(f"the update of the {name} was not finite")

    return update


def spent(call: Callable[[], object], runtime: Runtime) -> tuple[float, float]:
    """Return the seconds of a call between two barriers of all ranks, and the CPU seconds of all ranks."""
    gc.collect()
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    call()
    runtime.synchronize()
    cpu = time.process_time() - cpu_start
    dist.barrier()
    seconds = time.perf_counter() - start
    return seconds, sum(all_gather_objects(cpu))


class Bare:
    """Bare model on rank 0 with all threads. Other ranks wait."""

    def __init__(self, name: str, config: Config, runtime: Runtime, threads: int) -> None:
        from megappo.megatron.build import DTYPES

        self.runtime, self.threads = runtime, threads
        self.model: BareModel | None = None
        if runtime.is_main:
            self.model = BareModel(role_folder(config, name), DTYPES[config.model.dtype], is_critic=name == "critic")

    def spent(self, calls: list[Inputs], attention: str) -> tuple[float, float]:
        """Return the seconds and CPU seconds of forward and backward, measured by `spent`."""
        if self.model is not None:
            self.model.forget_gradients()
        return spent(partial(self._run, calls, attention), self.runtime)

    def _run(self, calls: list[Inputs], attention: str) -> None:
        if self.model is None:
            return
        ours = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        self.model.run(calls, attention)
        torch.set_num_threads(ours)


def measure(name: str, config: Config, runtime: Runtime, size: Size, arguments: argparse.Namespace) -> Row:
    """Compare one role with the bare model, in turns."""
    drawn = size.draw(load_architecture(role_folder(config, name), config.model).vocab_size)
    g = torch.Generator().manual_seed(3)
    targets = [torch.randn(n, generator=g) for _, n in drawn]
    update = our_update(name, config, runtime, drawn, targets)
    bare = Bare(name, config, runtime, arguments.threads)
    ways = {form: (calls, attention) for form, attention, calls in forms(drawn, targets)}
    warm: dict[str, list[float]] = {form: [] for form in ways}
    for _ in range(arguments.warmup):
        update()
        for form, way in ways.items():
            bare.spent(*way)
            # For one thread on a core with other load, CPU seconds are the better measure.
            warm[form].append(min(bare.spent(*way)))
    by_form = {form: statistics.median(seconds) for form, seconds in warm.items()}
    fastest = broadcast_object(min(by_form, key=by_form.__getitem__), src=0)
    rounds = [(spent(update, runtime), bare.spent(*ways[fastest])) for _ in range(arguments.repeat)]
    (ours, our_cpu), (theirs, their_cpu) = (list(zip(*side, strict=True)) for side in zip(*rounds, strict=True))
    ratios, cpu_ratios = (
        [x / y for x, y in zip(*pair, strict=True)] for pair in ((ours, theirs), (our_cpu, their_cpu))
    )
    medians = statistics.median(ratios), statistics.median(cpu_ratios)
    return Row(
        name, fastest, list(ours), list(theirs), ratios, medians[0], list(our_cpu), list(their_cpu), medians[1], by_form
    )


def measure_all(config: Config, size: Size, arguments: argparse.Namespace) -> tuple[list[Row], int] | None:
    """Return all rows and the number of ranks on the main rank, None on other ranks."""
    with start_runtime(config.runtime) as runtime:
        rows = []
        for name in arguments.roles:
            rows.append(measure(name, config, runtime, size, arguments))
            gc.collect()
        return (rows, runtime.world_size) if runtime.is_main else None


def print_rows(rows: list[Row], title: str) -> None:
    """Print the rows as a table."""
    cells = []
    for r in rows:
        seconds = (statistics.median(x) for x in (r.update_seconds, r.bare_seconds))
        ratios = (r.median_ratio, min(r.ratios), max(r.ratios), r.median_cpu_ratio)
        cells.append((r.role, r.form, *(f"{x:.3f}" for x in (*seconds, *ratios))))
    columns = ("role", "bare model", "update s", "bare s", "ratio", "from", "to", "CPU ratio")
    print_table(title, columns, cells, texts=2)


def _lengths(text: str) -> tuple[int, int]:
    """Parse '30' or '1-64' to the shortest and longest length."""
    shortest, _, longest = text.partition("-")
    limits = int(shortest), int(longest or shortest)
    if not 1 <= limits[0] <= limits[1]:
        raise argparse.ArgumentTypeError(f"{text} is no range of response lengths; give a range such as 30 or 1-64")
    return limits


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--roles", nargs="+", choices=["actor", "critic"], default=["actor", "critic"])
    parser.add_argument("--samples", type=int, default=16, help="samples per update")
    parser.add_argument("--prompt", type=int, default=43, help="tokens of each prompt")
    parser.add_argument("--responses", type=_lengths, default=(30, 30), metavar="N|FROM-TO", help="response tokens")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="threads of all ranks, and of the bare model")
    parser.add_argument("--warmup", type=int, default=1, help="rounds that are not counted")
    parser.add_argument("--repeat", type=int, default=7, help="rounds that are counted")
    return parser.parse_intermixed_args()


def settings(arguments: argparse.Namespace, size: Size, *, has_critic: bool) -> Iterator[str]:
    """Yield the overrides of the measurement."""
    yield from (
        "run.export_final_model=false", "model.init=random", "evaluation=null", "data.validation=null",
        "logging.console=quiet", "logging.tensorboard=false",
    )  # fmt: skip
    yield f"runtime.threads_per_rank={max(1, arguments.threads // int(os.environ.get('WORLD_SIZE', '1')))}"
    yield f"rollout.prompts_per_step={size.samples}"
    yield f"rollout.max_response_tokens={size.longest}"
    yield f"data.max_prompt_tokens={size.prompt}"
    for role in ("actor", "critic") if has_critic else ("actor",):
        yield f"{role}.minibatch_sequences={size.samples}"


def configuration(arguments: argparse.Namespace, size: Size, directory: str) -> Config:
    """Load the configuration with the overrides of the measurement. Raises ConfigError."""
    config = load_config(arguments.config, arguments.overrides)
    own = settings(arguments, size, has_critic=config.critic is not None)
    return resolve_for_device(load_config(arguments.config, [*own, *arguments.overrides, f"run.directory={directory}"]))


def main() -> int:
    arguments = parse()
    size = Size(arguments.samples, arguments.prompt, *arguments.responses)
    with tempfile.TemporaryDirectory() as directory:
        try:
            results = measure_all(configuration(arguments, size, directory), size, arguments)
        except ConfigError as error:
            return refuse("update", error)
    if results is None:
        return 0
    rows, ranks = results
    lengths = f"{size.prompt} + {size.shortest}" + (f" to {size.longest}" if size.longest > size.shortest else "")
    where = f"{ranks} rank{'s' * (ranks > 1)}, {arguments.threads} thread{'s' * (arguments.threads > 1)} in all"
    print_rows(rows, f"{size.samples} samples of {lengths} tokens, {where}, medians of {arguments.repeat}")
    saved = {"ranks": ranks, "threads": arguments.threads, "size": asdict(size), "rows": [asdict(r) for r in rows]}
    write_json(arguments, of_config("update", arguments) | saved)
    return 0


if __name__ == "__main__":
    sys.exit(main())
