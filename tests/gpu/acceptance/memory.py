"""Peak memory of the stages of a step, compared with `megappo plan`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from benchmarks.kernel_timing import peak_memory
from megappo.config import Config
from megappo.observe.timing.stopwatch import Lap
from megappo.plan.bytes.memory import RankMemory
from megappo.plan.here import this_machine
from megappo.plan.planner import make_plan, read_models
from megappo.ppo.reports.reporting import Reporter
from megappo.ppo.trainer import Trainer
from tests.gpu.acceptance.ppo_step import check_fits
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, judged, measured
from tests.gpu.acceptance.workload import Size, make_config, model_folder, settings, trainer

MOST_ABOVE_PLAN = 1.1
"""Limit relative to the planned bytes. If a plan is too low, a run can exhaust the memory."""


class MeteredReporter(Reporter):
    """A reporter that records the peak memory of every stage."""

    peaks: ClassVar[dict[str, int]] = {}

    @contextmanager
    def stage(self, name: str, waits_for: str = "") -> Iterator[Lap]:
        """Measure the stage: allocated bytes on CUDA, growth of the process on a CPU."""
        if torch.cuda.is_available():
            with super().stage(name, waits_for) as lap:
                yield lap
            self.peaks[name] = round(1e9 * self.stage_peaks[name])
            return
        with peak_memory() as grown, super().stage(name, waits_for) as lap:
            yield lap
        self.peaks[name] = grown[0]


def by_stage(place: Place) -> Iterator[Row]:
    """Run a real step with the embedded engine and responses of maximum length."""
    size = Size(4, 8, 8) if place.tiny else Size(32, 16, 240)
    name, dtype = "0.6B", "float32" if place.device == "cpu" else "bfloat16"
    folder = model_folder(place, name)
    content: dict[str, Any] = settings(place, folder, size, dtype)
    content["rollout"]["engine"] = "transformers"
    config = make_config(place, content, ["reference={}", "algorithm.kl_in_reward={kind: kl, coef: 0.01}"])
    check_fits(config)
    MeteredReporter.peaks.clear()
    with trainer(config, MeteredReporter) as t:
        t.sync_weights()
        t.step = 1
        t.ppo_step()
        resident = resident_bytes(t)
    planned = planned_memory(config)
    roles = sum(role.resident for role in planned.roles)
    share = resident / roles
    text = f"{resident / 1e9:.4g} GB, planned {roles / 1e9:.4g}, within 5%"
    what = f"{name}, {dtype}: weights, gradients, optimizers"
    yield judged(what, 0.95 <= share <= 1.05, text, held_bytes=resident, planned_bytes=roles)
    for stage, planned_bytes in planned.stages.items():
        peak = MeteredReporter.peaks[stage]
        what, numbers = f"{name}, {dtype}: {stage}", {"peak_bytes": peak, "planned_bytes": planned_bytes}
        text = f"peak {peak / 1e9:.3g} GB, planned {planned_bytes / 1e9:.3g}"
        if place.device == "cuda":
            is_within = peak <= MOST_ABOVE_PLAN * planned_bytes
            yield judged(what, is_within, f"{text}, at most {MOST_ABOVE_PLAN:g} times as much", **numbers)
        else:
            yield measured(what, f"{text} (growth of the process, including its allocator)", **numbers)


def planned_memory(config: Config) -> RankMemory:
    """Return the planned memory of the single rank on this machine."""
    return make_plan(config, read_models(config, None).models, this_machine(), 1).ranks[0]


def resident_bytes(t: Trainer) -> int:
    """Return the bytes of the roles between stages: distinct storages of parameters, gradient buffers and optimizer
    states."""
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> None:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    parts = t.parts
    for role in filter(None, (parts.actor, parts.critic, parts.reference)):
        for parameter in role.parameters():
            note(parameter)
    for role in parts.trained:
        optimizer: Any = role.optimizer  # type: ignore[attr-defined]
        for chunk in optimizer.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                note(buffer.grad_data)
        for part in getattr(optimizer.megatron, "chained_optimizers", [optimizer.megatron]):
            for main, state in part.optimizer.state.items():
                for tensor in (main, *(x for x in state.values() if torch.is_tensor(x) and x.dim())):
                    note(tensor)
    return sum(storages.values())
