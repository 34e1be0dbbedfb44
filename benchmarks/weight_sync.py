#!/usr/bin/env python3
"""How fast do weights get from a Megatron actor into SGLang servers, and where does the time go?

Usage: torchrun --nproc-per-node N -m benchmarks.weight_sync CONFIG [key=value ...] [--repeat 5] [--json FILE]
       benchmarks/weight_sync.py CONFIG [key=value ...] --simulate 128,512,1024 [--json FILE]

CONFIG has `rollout.engine: sglang`; model, layout, servers and bucket size are taken from it. One run times in turns:
- copy: the model's bytes copied once in this machine's memory (in its GPU's, on CUDA), a bucket at a time;
- sync: megappo's weight sync, with its phases on the rank that waits longest: gather (conversion included), load
  (waiting for the engine beyond what gathering hid), verify (fingerprints), session (opening, closing, flushing),
  wake (memory that changes hands);
- unverified: the same without comparing fingerprints;
- verl, slime: what weight_sync_peers.py says they do, to the first server only, unverified.

Under the table stands what each rank received in a sync, as counted when it arrived. `--simulate` gives the same for
worlds of so many ranks, without any of them (weight_sync_simulation.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megappo.config import Config, ConfigError, derive_run, load_config
from megappo.preflight.resolved import resolve_here


@dataclass(frozen=True)
class Row:
    """One way to move the weights; seconds are medians, gigabytes are 1e9 bytes."""

    way: str
    seconds: float
    gigabytes_per_second: float
    phases: dict[str, float]


@dataclass(frozen=True)
class Measured:
    """Results of a run of the benchmark."""

    rows: list[Row]
    received_bytes: list[int]
    """Bytes that each rank received from others in one weight sync."""


def interleaved(ways: Mapping[str, Callable[[], Any]], repeat: int) -> dict[str, list[float]]:
    """Seconds of each repetition of each way, in turns, after a first round that is not counted; a collective."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeat + 1):
        for way, action in ways.items():
            dist.barrier()
            started = time.perf_counter()
            action()
            dist.barrier()
            seconds[way].append(time.perf_counter() - started)
    return {way: found[1:] for way, found in seconds.items()}


def copy_once(parts: Any) -> Callable[[], None]:
    """The plain copy, made by the first rank."""
    import torch

    total = parts.weights.total_bytes
    size = min(parts.config.rollout.sync_bucket_bytes, total)
    source, target = (torch.ones(size, dtype=torch.uint8, device=parts.runtime.device) for _ in range(2))

    def run() -> None:
        left = total if parts.runtime.is_main else 0
        while left > 0:
            target[: min(size, left)].copy_(source[: min(size, left)])
            left -= size
        parts.runtime.synchronize()

    return run


def our_sync(parts: Any, verify: bool, phases: list[dict[str, float]]) -> Callable[[], None]:
    """A weight sync; its phases on this rank are appended to `phases`."""
    engine, settings = parts.engine, parts.config.rollout.servers.model_copy(update={"verify": verify})

    def run() -> None:
        engine.settings = settings
        engine.update_weights(parts.weights, engine.version + 1)
        phases.append(engine.sync_phases())

    return run


def measure(config: Config, repeat: int) -> Measured | None:
    """Measure all ways; returns the results on the main rank, None elsewhere."""
    import torch.distributed as dist

    from benchmarks.weight_sync_peers import check_peers, slime_sync, verl_sync
    from megappo.ppo.parts import RunMode, assemble
    from megappo.runtime.process import start_runtime

    derived = derive_run(config, int(os.environ.get("WORLD_SIZE", "1")))
    with start_runtime(config.runtime, with_servers=True) as runtime:
        parts = assemble(config, derived, runtime, RunMode(training=False))
        try:
            if parts.actor.arch.experts:
                raise ConfigError("model.path has experts, which the other ways do not gather here; name a dense model")
            parts.engine.update_weights(parts.weights, 1)  # starts the servers
            received = parts.weights.received_bytes
            check_peers(parts)
            phases: dict[str, list[dict[str, float]]] = {"sync": [], "unverified": []}
            ways = {
                "copy": copy_once(parts),
                "sync": our_sync(parts, True, phases["sync"]),
                "unverified": our_sync(parts, False, phases["unverified"]),
                "verl": verl_sync(parts),
                "slime": slime_sync(parts),
            }
            seconds = interleaved(ways, repeat)
        finally:
            parts.close()
        of_ranks: list[Any] = [None] * runtime.world_size
        all_received: list[Any] = [None] * runtime.world_size
        dist.all_gather_object(of_ranks, phases)
        dist.all_gather_object(all_received, received)
        total = parts.weights.total_bytes / 1e9
        medians = {way: statistics.median(found) for way, found in seconds.items()}
        rows = [Row(way, s, total / s, _slowest(of_ranks, way)) for way, s in medians.items()]
        return Measured(rows, all_received) if runtime.is_main else None


def _slowest(of_ranks: list[dict[str, list[dict[str, float]]]], way: str) -> dict[str, float]:
    """Median seconds of each phase on the rank that spends most in it, without the first repetition."""
    if way not in of_ranks[0]:
        return {}
    names = of_ranks[0][way][0]
    return {name: max(statistics.median(p[name] for p in rank[way][1:]) for rank in of_ranks) for name in names}


def show(measured: Measured) -> None:
    """Print the table."""
    rows = measured.rows
    print(f"{'way':<12}{'seconds':>10}{'GB/s':>8}  phases (seconds)")
    for row in rows:
        phases = ", ".join(f"{name} {value:.3f}" for name, value in row.phases.items())
        print(f"{row.way:<12}{row.seconds:>10.3f}{row.gigabytes_per_second:>8.2f}  {phases}")
    rate = {row.way: row.gigabytes_per_second for row in rows}
    for way in ("sync", "unverified"):
        peers = ", ".join(f"{rate[way] / rate[peer]:.1f}x {peer}'s way" for peer in ("verl", "slime"))
        print(f"{way}: {rate[way] / rate['copy']:.0%} of the copy, {peers}")
    print("received:", ", ".join(f"rank {n} {b / 1e9:.4g} GB" for n, b in enumerate(measured.received_bytes)))


def simulated(config: Config, arguments: argparse.Namespace) -> int:
    """Print the traffic of a sync on larger, simulated worlds."""
    from benchmarks import weight_sync_simulation

    worlds = list(weight_sync_simulation.simulate(config, Path(arguments.config).parent, arguments.simulate))
    weight_sync_simulation.show(worlds)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(world) for world in worlds], indent=2))
    return 0


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--simulate", type=lambda given: [int(n) for n in given.split(",")], metavar="RANKS,RANKS,...")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            config = load_config(arguments.config, [f"run.directory={scratch}/run", *arguments.overrides])
            if arguments.simulate is not None:
                return simulated(config, arguments)
            config = resolve_here(config)
            if not config.rollout.has_servers:
                raise ConfigError(f"rollout.engine is '{config.rollout.engine}', must be sglang for this benchmark")
            measured = measure(config, arguments.repeat)
        except ConfigError as error:
            print("\n".join(f"weight_sync: error: {problem}" for problem in error.problems), file=sys.stderr)
            return 2
    if measured is not None:
        show(measured)
        if arguments.json is not None:
            report = {"machine": platform.platform(), "cores": os.cpu_count(), **asdict(measured)}
            arguments.json.write_text(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
