"""Profile of a step: each stage is split into computing, exchanging and idle time, for every rank."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType

from megappo.commands.report import report
from megappo.observe.profiler import StepProfiler, read_events
from megappo.observe.step_profile import RankProfile, StageShare, newest_page, page, shares, united

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda x: (x[0], x[0] + x[1])), max_size=12)


def covered(intervals: list[Any], start: int, end: int) -> set[int]:
    return {second for a, b in intervals for second in range(max(a, start), min(b, end))}


@given(INTERVALS, INTERVALS, st.integers(0, 40), st.integers(1, 40))
def test_time_is_counted_once(work: list[Any], exchange: list[Any], start: int, seconds: int) -> None:
    """The expected values come from sets of microseconds. Exchange during computation is not counted."""
    end = start + seconds
    parts = shares([("a", (start, end)), ("b", (200, 210)), ("a", (300, 300 + seconds))], work, exchange)
    a, b = parts
    busy = covered(work, start, end)
    assert a.computing == pytest.approx(1e-6 * len(busy))
    assert a.exchanging == pytest.approx(1e-6 * len(covered(exchange, start, end) - busy))
    assert a.seconds == pytest.approx(2e-6 * seconds)
    assert (b.stage, b.computing, b.exchanging) == ("b", 0.0, 0.0) and b.idle == pytest.approx(1e-5)
    assert covered(united(work), 0, 100) == covered(work, 0, 100)


@pytest.mark.waits
def test_trace_contains_the_operations(tmp_path: Path) -> None:
    """One stage multiplies matrices and another stage sleeps. Steps that are not selected are not traced."""
    profiler = StepProfiler(tmp_path, [2], rank=0, on_cuda=False)
    profiler.begin(1)
    assert not profiler.is_running
    with profiler.stage("products"):
        pass
    profiler.begin(2)
    matrix = torch.ones(400, 400)
    with profiler.stage("products"):
        for _ in range(20):
            matrix @ matrix
    with profiler.stage("sleep"):
        time.sleep(0.05)
    rank = profiler.end()
    path = profiler.write_page([rank, rank])
    products, sleep = rank.stages
    assert [products.stage, sleep.stage] == ["products", "sleep"]
    assert products.computing > 0.5 * products.seconds
    assert sleep.seconds >= 0.05 and sleep.idle > 0.9 * sleep.seconds
    assert rank.calls["aten::mm"] == 20 and max(rank.operators, key=rank.operators.__getitem__) == "aten::mm"
    assert newest_page(tmp_path) == path and "| `aten::mm` | 20 |" in path.read_text()
    assert (path.parent / "step-000002-rank-0.json.gz").stat().st_size > 0
    assert [stage["stage"] for stage in json.loads(path.with_suffix(".json").read_text())[1]["stages"]] == [
        "products", "sleep",
    ]  # fmt: skip


def event(name: str, start: int, end: int, *, on_device: bool = False, is_mark: bool = False) -> Any:
    """Return an event of the profiler of torch, in microseconds."""
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), is_user_annotation=is_mark,
        device_type=DeviceType.CUDA if on_device else DeviceType.CPU,
        self_cpu_time_total=end - start, self_device_time_total=end - start if on_device else 0,
    )  # fmt: skip


def test_kernels_count_as_work_on_a_gpu() -> None:
    """Host events of NCCL are not counted as exchange. Kernels of NCCL and events of gloo are counted."""
    profile = read_events(
        [
            event("megappo: update_actor", 0, 100, is_mark=True),
            event("megappo: update_actor", 10, 90, on_device=True, is_mark=True),
            event("aten::mm", 0, 60),
            event("gemm", 10, 40, on_device=True),
            event("c10d::allreduce_", 60, 99),
            event("ncclDevKernel_AllReduce", 30, 50, on_device=True),
            event("gloo:all_gather", 70, 75),
        ],
        on_cuda=True,
    )
    (stage,) = profile.stages
    assert (stage.stage, profile.calls, profile.operators) == (
        "update_actor",
        {"gemm": 1},
        {"gemm": pytest.approx(3e-5)},
    )
    assert (stage.seconds, stage.computing) == (pytest.approx(1e-4), pytest.approx(3e-5))
    assert stage.exchanging == pytest.approx(1.5e-5) and stage.idle == pytest.approx(5.5e-5)


def test_unfinished_step_does_not_affect_the_next_step(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, [1, 2], rank=0, on_cuda=False)
    for step in (1, 2):
        profiler.begin(step)
        torch.ones(3) + step
    assert profiler.end().calls["aten::add"] == 1
    profiler.begin(1)
    profiler.cancel()
    assert not profiler.is_running


def test_page_of_many_ranks_shows_three_ranks() -> None:
    ranks = [
        RankProfile([StageShare("forward", 1.0 + (7 * n) % 20, 0.5, 0.25)], {"mm": 2.0}, {"mm": 4}) for n in range(20)
    ]
    rows = [line.split(" | ")[1:3] for line in page(3, ranks, "here").splitlines() if line.startswith("| forward")]
    assert rows == [["0", "1.000"], ["10", "11.000"], ["17", "20.000"]]
    few = page(3, ranks[:8], "here").splitlines()
    assert sum(line.startswith("| forward") for line in few) == 8
    assert "| forward | 0 | 1.000 | 50% | 25% | 25% |" in few and "| all | 0 | 1.000 | 50% | 25% | 25% |" in few
    assert "| `mm` | 4 | 2.000 | 100% |" in few


def test_report_contains_the_newest_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert "traced" not in report(str(tmp_path))
    (tmp_path / "profile").mkdir()
    for step in (3, 12):
        (tmp_path / "profile" / f"step-{step:06d}.md").write_text(page(step, [], "here"))
    assert "# Step 12, traced" in report(str(tmp_path)) and "# Step 3," not in report(str(tmp_path))
