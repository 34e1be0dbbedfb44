#!/usr/bin/env python3
"""Measure the time of a weight sync from a Megatron actor to SGLang servers, by phase.

Usage: torchrun --nproc-per-node N -m benchmarks.weight_sync CONFIG [key=value ...] [--repeat 5] [--json FILE]
       benchmarks/weight_sync.py CONFIG [key=value ...] --simulate 128,512,1024 [--json FILE]

CONFIG must set `rollout.servers`. Model, layout, servers and bucket size are those of CONFIG. One run
measures in turns:

- copy: one copy of the model's bytes within the memory of this machine (or of its GPU), by buckets;
- sync: megappo's weight sync with its phases, each on the rank with the longest time: gather (including conversion),
  load (waiting for the engine, as far as gathering does not hide it), verify (fingerprints), session (opening,
  closing, flushing), wake (transfer of device memory);
- unverified: the sync without comparison of fingerprints;
- verl, slime: the ways of weight_sync_peers.py, to the first server only, unverified.

The program also prints the received bytes of each rank in a sync. `--simulate` computes these bytes for larger
worlds (weight_sync_simulation.py).
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
from megappo.preflight.resolved import resolve_for_device


@dataclass(frozen=True)
class Row:
    """One way to transfer the weights. Seconds are medians, and gigabytes are 1e9 bytes."""

    way: str
    seconds: float
    gigabytes_per_second: float
    phases: dict[str, float]


@dataclass(frozen=True)
class Measured:
    """Results of a run of the benchmark."""

    rows: list[Row]
    received_bytes: list[int]
    """Bytes that each rank received from other ranks in one weight sync."""


def interleaved(ways: Mapping[str, Callable[[], Any]], repeat: int) -> dict[str, list[float]]:
    """Return the seconds of each repetition of each way, in turns. The first round is not counted. All ranks must
    call the function."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeat + 1):
        for way, action in ways.items():
            dist.barrier()
            started = time.perf_counter()
            action()
            dist.barrier()
            seconds[way].append(time.perf_counter() - started)
    return {way: of_way[1:] for way, of_way in seconds.items()}


def copy_once(parts: Any) -> Callable[[], None]:
    """Return the plain copy. Only the first rank copies."""
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
    """Return a weight sync that appends its phases to `phases`."""
    engine, settings = parts.engine, parts.config.rollout.server_settings.model_copy(update={"verify": verify})

    def run() -> None:
        engine.settings = settings
        phases.append(engine.update_weights(parts.weights, engine.version + 1).phases())

    return run


def measure(config: Config, repeat: int) -> Measured | None:
    """Measure all ways. Returns the results on the main rank, None on other ranks."""
    import torch.distributed as dist

    from benchmarks.weight_sync_peers import check_peers, slime_sync, verl_sync
    from megappo.ppo.assembly.components import RunMode, assemble
    from megappo.runtime.process import start_runtime

    derived = derive_run(config, int(os.environ.get("WORLD_SIZE", "1")))
    with start_runtime(config.runtime, with_servers=True) as runtime:
        parts = assemble(config, derived, runtime, RunMode(training=False))
        try:
            if parts.actor.arch.experts:
                raise ConfigError("model.path has experts, which the other ways do not support; use a dense model")
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
        all_received: list[Any] = [None] * runtime.world_size
        dist.all_gather_object(all_received, received)
        total = parts.weights.total_bytes / 1e9
        medians = {way: statistics.median(of_way) for way, of_way in seconds.items()}
        rows = [Row(way, s, total / s, _medians(phases.get(way, []))) for way, s in medians.items()]
        return Measured(rows, all_received) if runtime.is_main else None


def _medians(phases: list[dict[str, float]]) -> dict[str, float]:
    """Return the median seconds of each phase. The first repetition is not counted."""
    return {name: statistics.median(of_sync[name] for of_sync in phases[1:]) for name in phases[0]} if phases else {}


def show(measured: Measured) -> None:
    """Print the results as a table."""
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
    """Print the traffic of a sync in larger, simulated worlds."""
    from benchmarks import weight_sync_simulation

    worlds = list(weight_sync_simulation.simulate(config, Path(arguments.config).parent, arguments.simulate))
    weight_sync_simulation.show(worlds)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(world) for world in worlds], indent=2))
    return 0


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--simulate", type=lambda text: [int(n) for n in text.split(",")], metavar="RANKS,RANKS,...")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            config = load_config(arguments.config, [f"run.directory={scratch}/run", *arguments.overrides])
            if arguments.simulate is not None:
                return simulated(config, arguments)
            config = resolve_for_device(config)
            if not config.rollout.capabilities.separate_processes:
                raise ConfigError(
                    f"the engine is '{config.rollout.engine_name}'; set rollout.servers for this benchmark"
                )
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
