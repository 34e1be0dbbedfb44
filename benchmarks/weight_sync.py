#!/usr/bin/env python3
"""How fast do weights get from a Megatron actor into SGLang servers, and where does the time go?

Usage: torchrun --nproc-per-node N benchmarks/weight_sync.py CONFIG [key=value ...] [--repeat 5] [--json FILE]

CONFIG has `rollout.engine: sglang`; model, layout, servers and bucket size are taken from it. In one run are timed:
- copy: the model's bytes copied once in this machine's memory (in its GPU's, on CUDA), a bucket at a time;
- sync: megappo's weight sync, with its phases on the rank that waits longest: gather (conversion included), load
  (waiting for the engine beyond what gathering hid), verify (fingerprints), session (opening, closing, flushing);
- unverified: the same without comparing fingerprints;
- naive: every tensor gathered by itself, cloned, and handed over by itself in one request, as verl's per-tensor path
  does it; on one server.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from megappo.config import Config, ConfigError, derive_run, load_config  # noqa: E402


@dataclass(frozen=True)
class Row:
    """One way to move the weights; seconds are medians, gigabytes are 1e9 bytes."""

    way: str
    seconds: float
    gigabytes_per_second: float
    phases: dict[str, float]


def timed(action: Callable[[], Any], repeat: int) -> list[float]:
    """Seconds of each repetition after a first one that is not counted; a collective where `action` is one."""
    import torch.distributed as dist

    seconds = []
    for _ in range(repeat + 1):
        dist.barrier()
        started = time.perf_counter()
        action()
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def copy_once(parts: Any) -> Callable[[], None]:
    """The plain copy, made by the first rank."""
    import torch

    size, total = parts.weights.largest_bucket_bytes, parts.weights.total_bytes
    source, target = (torch.ones(size, dtype=torch.uint8, device=parts.runtime.device) for _ in range(2))

    def run() -> None:
        left = total if parts.runtime.is_main else 0
        while left > 0:
            target[: min(size, left)].copy_(source[: min(size, left)])
            left -= size
        parts.runtime.synchronize()

    return run


def naive_sync(parts: Any) -> Callable[[], None]:
    """Tensor by tensor, with stock SGLang's format for that."""
    import base64
    import io
    from multiprocessing.reduction import ForkingPickler

    from megappo.reshard.stream import WeightStream
    from megappo.rollout.sglang.client import call
    from megappo.rollout.sglang.transport import share_by_name

    arch, actor = parts.architecture, parts.actor
    stream = WeightStream(
        actor.placement.grid, arch, actor.model, padded_vocab=parts.derived.actor.padded_vocab_size,
        dtype=parts.weights.buckets[0].slots[0].dtype, device=parts.runtime.device, bucket_bytes=1,
    )  # fmt: skip
    endpoint = parts.engine.endpoints[0]
    ranks = parts.config.rollout.servers.tensor_parallel

    def serialize(named: list[tuple[str, Any]]) -> str:
        out = io.BytesIO()
        ForkingPickler(out).dump(named)
        return base64.b64encode(out.getvalue()).decode()

    def run() -> None:
        share_by_name()
        sends = parts.runtime.rank == endpoint.sender
        named = [(name, tensor.clone()) for name, tensor in stream]
        if sends:
            call(endpoint, "/begin_weight_update", timeout_seconds=300)
            body = {"serialized_named_tensors": [serialize(named) for _ in range(ranks)], "flush_cache": False}
            call(endpoint, "/update_weights_from_tensor", body, timeout_seconds=300)
            call(endpoint, "/end_weight_update", timeout_seconds=300)

    return run


def measure(config: Config, repeat: int) -> list[Row] | None:
    """The table, on the main rank."""
    import torch.distributed as dist

    from megappo.assembly import assemble
    from megappo.runtime import start_runtime

    derived = derive_run(config, int(os.environ.get("WORLD_SIZE", "1")))
    with start_runtime(config.runtime) as runtime:
        parts = assemble(config, derived, runtime, training=False)
        engine: Any = parts.engine
        try:
            total = parts.weights.total_bytes / 1e9
            rows = [Row("copy", *_rate(total, timed(copy_once(parts), repeat)), {})]
            engine.update_weights(parts.weights, 1)  # starts the servers
            for way, verify in (("sync", True), ("unverified", False)):
                engine._settings = config.rollout.servers.model_copy(update={"verify": verify})
                seconds = timed(lambda: engine.update_weights(parts.weights, 1), repeat)
                slowest: list[dict[str, float]] = [{}] * runtime.world_size
                dist.all_gather_object(slowest, engine.sync_phases())
                phases = {name: max(rank[name] for rank in slowest) for name in slowest[0]}
                rows.append(Row(way, *_rate(total, seconds), phases))
            rows.append(Row("naive", *_rate(total, timed(naive_sync(parts), repeat)), {}))
        finally:
            parts.close()
        return rows if runtime.is_main else None


def _rate(total: float, seconds: list[float]) -> tuple[float, float]:
    median = statistics.median(seconds)
    return median, total / median


def show(rows: list[Row]) -> None:
    """Print the table."""
    print(f"{'way':<12}{'seconds':>10}{'GB/s':>8}  phases (seconds)")
    for row in rows:
        phases = ", ".join(f"{name} {value:.3f}" for name, value in row.phases.items())
        print(f"{row.way:<12}{row.seconds:>10.3f}{row.gigabytes_per_second:>8.2f}  {phases}")
    rate = {row.way: row.gigabytes_per_second for row in rows}
    for way in ("sync", "unverified"):
        print(f"{way}: {rate[way] / rate['copy']:.0%} of the copy, {rate[way] / rate['naive']:.1f}x the naive path")


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            config = load_config(arguments.config, [f"run.directory={scratch}/run", *arguments.overrides])
            if config.rollout.engine != "sglang":
                raise ConfigError(f"rollout.engine is '{config.rollout.engine}', must be sglang for this benchmark")
            rows = measure(config, arguments.repeat)
        except ConfigError as error:
            print("\n".join(f"weight_sync: error: {problem}" for problem in error.problems), file=sys.stderr)
            return 2
    if rows is not None:
        show(rows)
        if arguments.json is not None:
            report = {"machine": platform.platform(), "cores": os.cpu_count(), "rows": [asdict(row) for row in rows]}
            arguments.json.write_text(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
