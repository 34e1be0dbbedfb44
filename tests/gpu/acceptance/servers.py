"""SGLang on the trainer's device: it sleeps while the trainer computes, and takes the new weights when it wakes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from megappo.observe.stopwatch import Lap
from megappo.ppo.reporting import Reporter
from megappo.runtime.packages import installed_version
from tests.gpu.acceptance.packs import NATS
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, Skip, judged, measured, within
from tests.gpu.acceptance.workload import ACTOR_ONLY, Size, make_config, model_folder, settings, trainer

STEPS = 3
CACHE_TOKENS = 65536


class FreeMemoryReporter(Reporter):
    """Notes what is free on the device when a stage begins."""

    free: ClassVar[dict[str, int]] = {}

    def stage(self, name: str, waits_for: str = "") -> AbstractContextManager[Lap]:
        """The stage; what other processes hold counts too."""
        if torch.cuda.is_available():
            self.free[name] = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        return super().stage(name, waits_for)


def sleep_train_wake(place: Place) -> Iterator[Row]:
    """Three steps of a run through one server: rollout, sleep, update, wake, weights by shared memory or IPC."""
    if installed_version("sglang") is None:
        raise Skip("sglang is not installed")
    size = Size(8, 8, 16) if place.tiny else Size(64, 16, 256)
    dtype = "float32" if place.device == "cpu" else "bfloat16"
    content: dict[str, Any] = settings(place, model_folder(place, "0.6B"), size, dtype)
    content["rollout"] |= {"engine": "sglang", "sglang": {"max_total_tokens": 4096 if place.tiny else CACHE_TOKENS}}
    if place.device == "cpu":
        content["rollout"]["sglang"]["threads"] = 1
    words = [*ACTOR_ONLY, f"actor.optimizer.learning_rate={1e-3 if place.tiny else 1e-5}"]
    FreeMemoryReporter.free.clear()
    with trainer(make_config(place, content, words), FreeMemoryReporter) as t:
        t.sync_weights()
        for step in range(1, STEPS + 1):
            t.step = step
            t.ppo_step()
            yield from _step(t.metrics, step, t.parts.weights.total_bytes, NATS[dtype])
        version = t.parts.engine.version
    yield judged("versions", version == STEPS + 1, f"{version} after {STEPS} updates", version=version)
    if FreeMemoryReporter.free:
        awake, asleep = FreeMemoryReporter.free["rollout"], FreeMemoryReporter.free["update_actor"]
        words_of_memory = f"{awake / 1e9:.1f} GB free for the trainer with the server awake, {asleep / 1e9:.1f} asleep"
        yield judged("memory while asleep", asleep > awake, words_of_memory, awake_bytes=awake, asleep_bytes=asleep)


def _step(metrics: dict[str, float], step: int, n_bytes: int, nats: float) -> Iterator[Row]:
    """What a sync cost, which has compared fingerprints or raised, and how far the engine is from the trainer."""
    what = f"step {step}"
    of_phases = {n: s for n, s in metrics.items() if n.startswith("sync/") and n.endswith("_seconds")}
    phases = ", ".join(f"{n.removeprefix('sync/').removesuffix('_seconds')} {s:.3f}" for n, s in of_phases.items())
    words = (
        f"{n_bytes / 1e9:.3g} GB in {metrics['sync/seconds']:.3f} s, {metrics['sync/gigabytes_per_second']:.2f} GB/s"
    )
    yield measured(f"{what}: sync with fingerprints", f"{words} ({phases})", seconds=metrics["sync/seconds"],
                   gigabytes_per_second=metrics["sync/gigabytes_per_second"])  # fmt: skip
    gaps = {"probe": metrics["sync/probe_gap"], "rollout, mean": metrics["mismatch/mean"]}
    yield within(f"{what}: engine beside trainer, nats", gaps, nats, largest=metrics["mismatch/max"])
    yield judged(f"{what}: restarts", not metrics["engine/restarts"], f"{metrics['engine/restarts']:g} servers")
