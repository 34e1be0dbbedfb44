"""Cost of a layer on the host: launched kernels and synchronisations with the device."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, judged, measured
from tests.gpu.acceptance.workload import (
    ACTOR_ONLY,
    Size,
    make_config,
    model_folder,
    rollouts,
    samples,
    settings,
    trainer,
)
from tests.support.workers.reads_worker import Copies, Reads

MICROBATCHES = 4
MOST_WAITS = 4.0
"""Limit of synchronisations of the host with the device per microbatch of an update."""
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")


@dataclass(frozen=True)
class Counts:
    """Counts of a call."""

    launches: int
    """Kernels on CUDA, operators on a CPU."""
    waits: int
    """Synchronising operations on CUDA, reads by the host on a CPU."""
    where: str = ""
    """Lines with the most synchronisations on CUDA, with their counts."""


class _Operators(TorchDispatchMode):
    """Counter of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def counted_on_cpu(call: Callable[[], Any]) -> Counts:
    """Count with modes of torch. Reads on a CPU correspond to synchronisations on a GPU."""
    with _Operators() as operators, Reads() as scalars, Copies() as tensors:
        call()
    return Counts(operators.count, scalars.count + tensors.count)


def counted_on_cuda(call: Callable[[], Any]) -> Counts:
    """Count launches with the profiler of torch, and synchronisations with the sync debug mode of CUDA, which warns
    at each synchronisation."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    launches = sum(e.count for e in profiled.key_averages() if e.key.startswith(_LAUNCHES))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in warned if "synchronizing CUDA operation" in str(w.message)]
    lines = Counter(f"{'/'.join(Path(w.filename).parts[-2:])}:{w.lineno}" for w in waits)
    return Counts(launches, len(waits), ", ".join(f"{count} x {line}" for line, count in lines.most_common(4)))


def per_layer(place: Place) -> Iterator[Row]:
    """Count a forward pass and an update of four microbatches, for a small number of layers and twice this number."""
    few = 2 if place.tiny else 4
    small, large = _counts(place, few), _counts(place, 2 * few)
    name = "kernels" if place.device == "cuda" else "operators"
    for stage, least in small.items():
        more = large[stage]
        launches = (more.launches - least.launches) / few / MICROBATCHES
        waits = (more.waits - least.waits) / few / MICROBATCHES
        text = f"{launches:.1f} {name} per layer and microbatch, {least.launches} in all with {few} layers"
        yield measured(f"{stage}: launches", text, launches_per_layer=launches)
        # The optimizer of torch reads its step count from host memory, which is not a synchronisation on a GPU.
        is_judged = place.device == "cuda" or stage == "forward"
        yield _waits(f"{stage}: waits per layer", waits, 0.0 if is_judged else None, "layer and microbatch")
        most = MOST_WAITS if place.device == "cuda" else None
        yield _waits(f"{stage}: waits", least.waits / MICROBATCHES, most, "microbatch", least.where)


def _waits(what: str, waits: float, most: float | None, of: str, where: str = "") -> Row:
    text = f"{waits:.2f} per {of}"
    if most is None:
        return measured(what, f"{text}, reads on a CPU included", waits=waits)
    return judged(what, waits <= most, f"{text}, bound {most:g}{where and f'; {where}'}", waits=waits)


def _counts(place: Place, layers: int) -> dict[str, Counts]:
    size = Size(MICROBATCHES, 8, 8) if place.tiny else Size(MICROBATCHES, 512, 512)
    folder = model_folder(place, "0.6B", layers=layers)
    dtype = "float32" if place.device == "cpu" else "bfloat16"
    overrides = [*ACTOR_ONLY, f"actor.microbatch_budget_tokens={size.prompt + size.response}"]
    count = counted_on_cuda if place.device == "cuda" else counted_on_cpu
    with trainer(make_config(place, settings(place, folder, size, dtype), overrides)) as t:
        rollout, scores_B = rollouts(samples(size, folder, ragged=False))
        t.step = 1
        placed, scored = t.forward(rollout, scores_B)
        assert placed.actor is not None
        experience = t.estimate_advantages(scored)
        t.update_actor(placed, experience)  # compile, allocate and tune
        return {"forward": count(placed.actor.forward), "update": count(lambda: t.update_actor(placed, experience))}
