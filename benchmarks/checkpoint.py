#!/usr/bin/env python3
"""Measure the cost of a checkpoint, compared with a plain torch.save of the same bytes.

Usage: torchrun --nproc-per-node N -m benchmarks.checkpoint CONFIG [key=value ...] [--repeat 5] [--json FILE]

The program builds the models and optimizers of a configuration, and makes one PPO step so that Adam has moments. It
then measures the following actions in turns, `repeat` times each: PPO steps alone; PPO steps with a checkpoint in
the background; the time for which an asynchronous checkpoint blocks training; a synchronous checkpoint; torch.save
of this rank's tensors to one synced file; the check and load of a checkpoint; torch.load. The program prints
medians, and uses a temporary run directory.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import of_config, parser_of, print_table, refuse, write_json
from megappo.config import Config, ConfigError, derive_run, load_config
from megappo.preflight.resolved import resolve_for_device


@dataclass(frozen=True)
class Row:
    """Median seconds of an action on the slowest rank. Gigabytes (1e9 bytes) are totals over all ranks."""

    what: str
    median_seconds: float
    gigabytes_per_second: float | None


class Measurement:
    """Models of one configuration, with functions that time actions."""

    def __init__(self, parts: Any, training: Any, checkpoints: Any, repeat: int) -> None:
        self.parts, self.training, self.checkpoints, self.repeat = parts, training, checkpoints, repeat
        self.tensors: dict[str, Any] = {}

    def medians(self, works: Mapping[str, Callable[[], None]]) -> dict[str, float]:
        """Return the median seconds of each action on the slowest rank. Repetitions of the actions alternate. No
        save is in progress when an action starts."""
        seconds_by_name: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(self.repeat):
            for name, work in works.items():
                self.next_save()
                seconds_by_name[name].append(self._seconds(work))
        return {name: statistics.median(seconds) for name, seconds in seconds_by_name.items()}

    def _seconds(self, work: Callable[[], None]) -> float:
        import torch
        import torch.distributed as dist

        self.parts.runtime.synchronize()
        dist.barrier()
        start = time.perf_counter()
        work()
        self.parts.runtime.synchronize()
        slowest = torch.tensor([time.perf_counter() - start], device=self.parts.runtime.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def step(self) -> None:
        """Make a PPO step."""
        self.training.trainer.step += 1
        self.training.trainer.ppo_step()

    def save(self, *, wait: bool) -> None:
        """Save a checkpoint of the current state."""
        from megappo.ppo.records.checkpoints import Boundary

        self.checkpoints.save(Boundary(self.training.state_dict(), {}, {}), wait=wait)

    def next_save(self) -> None:
        """Wait for the save in progress, and increase the step for the next checkpoint."""
        self.checkpoints.finish()
        self.training.trainer.step += 1

    def own_tensors(self) -> dict[str, Any]:
        """Return the tensors that this rank writes to a checkpoint."""
        from megappo.checkpoint.shards import role_shards

        return {key: shard.data for role in self.parts.trained for key, shard in role_shards(role).items()}


def measure(config: Config, repeat: int) -> list[Row] | None:
    """Return all rows on the main rank, None on other ranks."""
    import torch
    import torch.distributed as dist

    from megappo.checkpoint.select import select_checkpoint
    from megappo.checkpoint.shards import load_shards, role_updates
    from megappo.ppo.assembly.components import assemble
    from megappo.ppo.assembly.start import Start
    from megappo.ppo.records.checkpoints import Checkpoints
    from megappo.ppo.reports.reporting import Reporter
    from megappo.ppo.training_run import TrainingRun
    from megappo.runtime.process import start_runtime

    derived = derive_run(config, int(os.environ.get("WORLD_SIZE", "1")))
    with start_runtime(config.runtime) as runtime, closing(Reporter(config, derived, runtime)) as reporter:
        parts = assemble(config, derived, runtime)
        checkpoints = Checkpoints(parts, Start(config))
        try:
            training = TrainingRun(parts, reporter, checkpoints)
            training.trainer.sync_weights()
            m = Measurement(parts, training, checkpoints, repeat)
            m.step()
            own = m.own_tensors()
            size = torch.tensor([sum(t.nbytes for t in own.values())], device=runtime.device)
            dist.all_reduce(size)
            plain = config.run.path / f"plain-{runtime.rank}.pt"
            roles = parts.trained

            def save_plain() -> None:
                with plain.open("wb") as file:
                    torch.save(own, file)
                    os.fsync(file.fileno())

            def load() -> None:
                chosen = select_checkpoint(config.run.path / "checkpoints", runtime)
                assert chosen is not None
                load_shards(chosen[0], roles, {r.placement.name: role_updates(r) for r in roles})

            def save_and_step() -> None:
                m.save(wait=False)
                m.step()

            timings = m.medians({
                "step alone": m.step,
                "step with a checkpoint in the background": save_and_step,
                "stand-still, asynchronous": lambda: m.save(wait=False),
                "on disk, waited for": lambda: m.save(wait=True),
                "torch.save of the same bytes": save_plain,
                "check and load": load,
                "torch.load of the same bytes": lambda: torch.load(plain, weights_only=True) and None,
            })  # fmt: skip
        finally:
            checkpoints.close()
            parts.close()
        gigabytes = float(size) / 1e9
        rates = {name: None if "step" in name else gigabytes / seconds for name, seconds in timings.items()}
        rows = [Row(name, seconds, rates[name]) for name, seconds in timings.items()]
        return [*rows, Row(f"{gigabytes:.3f} GB", 0.0, None)] if runtime.is_main else None


def print_rows(rows: list[Row], title: str) -> None:
    """Print the rows as a table."""
    rates = ("" if r.gigabytes_per_second is None else f"{r.gigabytes_per_second:.2f}" for r in rows)
    cells = [(r.what, f"{r.median_seconds:.3f}", rate) for r, rate in zip(rows, rates, strict=True)]
    print_table(title, ("", "median s", "GB/s"), cells)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="repetitions of each measurement")
    arguments = parser.parse_intermixed_args()
    quiet = ["evaluation=null", "data.validation=null", "logging.console=quiet", "logging.tensorboard=false"]
    # All ranks use one folder.
    folder = Path(tempfile.gettempdir()) / f"megappo-checkpoint-{os.environ.get('MASTER_PORT', os.getpid())}"
    place = [f"run.directory={folder}", "run.steps=1000000", "checkpoint={keep_last: 1, asynchronous: true}"]
    try:
        config = load_config(arguments.config, [*quiet, *arguments.overrides, *place])
        config = resolve_for_device(config)
        rows = measure(config, arguments.repeat)
    except ConfigError as error:
        return refuse("checkpoint", error)
    if rows is None:
        return 0
    shutil.rmtree(folder)
    size = rows.pop().what
    print_rows(rows, f"{config.run.name}: {size} over all ranks, medians of {arguments.repeat}")
    write_json(arguments, of_config("checkpoint", arguments) | {"size": size, "rows": [asdict(r) for r in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
