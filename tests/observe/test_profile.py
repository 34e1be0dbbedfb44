"""Time of a step: profiles of every rank, seconds per stage, MFU, and messages about slow ranks."""

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
from megappo.observe.timing.profiler import StepProfiler, read_events
from megappo.observe.timing.step_profile import RankProfile, StageShare, newest_page, page, shares, united
from megappo.observe.timing.stopwatch import StageTimer
from megappo.observe.timing.stragglers import Stragglers
from megappo.observe.timing.throughput import mfu, peak_flops, training_flops_per_token

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
            event("megappo: update_actor", 10, 90, on_device=True, is_mark=True), event("aten::mm", 0, 60),
            event("gemm", 10, 40, on_device=True), event("c10d::allreduce_", 60, 99),
            event("ncclDevKernel_AllReduce", 30, 50, on_device=True), event("gloo:all_gather", 70, 75),
        ],
        on_cuda=True,
    )  # fmt: skip
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


def test_stages_add_up_until_reset() -> None:
    waits: list[str] = []
    timer = StageTimer(lambda: waits.append("wait"))
    with timer.stage("rollout") as lap:
        time.sleep(0.01)
        assert lap.seconds == 0.0
    first = lap.seconds
    with timer.stage("rollout") as lap:
        pass
    with timer.stage("sync"):
        pass
    assert first >= 0.01
    assert list(timer.seconds) == ["rollout", "sync"]
    assert timer.seconds["rollout"] == first + lap.seconds
    assert timer.total >= sum(timer.seconds.values())
    assert len(waits) == 3
    before = timer.total
    timer.reset()
    assert timer.seconds == {} and timer.total < before


def test_stage_has_a_separate_memory_peak() -> None:
    """The peak before a stage counts only for the whole step."""
    peaks = iter([9.0, 2.0, 1.0, 5.0, 0.5, 3.0, 4.0, 6.0])
    timer = StageTimer(peak_since=lambda: next(peaks))
    for name in ("rollout", "update_actor", "rollout"):
        with timer.stage(name):
            pass
    assert timer.peaks == {"rollout": 3.0, "update_actor": 5.0} and timer.peak == 9.0
    timer.reset()
    with timer.stage("sync"):
        pass
    assert timer.peaks == {"sync": 6.0} and timer.peak == 9.0


def test_stage_waits_for_the_device() -> None:
    timer = StageTimer(lambda: time.sleep(0.02))
    with timer.stage("forward") as lap:
        pass
    assert lap.seconds >= 0.02


def test_stage_is_announced_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def announce(name: str) -> None:
        names.append(name)
        clock[0] += 100.0

    timer = StageTimer(on_enter=announce)
    with timer.stage("rollout"):
        assert names == ["rollout"]
        clock[0] += 1.0
    with timer.stage("reward"):
        pass
    assert names == ["rollout", "reward"]
    assert timer.seconds == {"rollout": 1.0, "reward": 0.0}


def test_stages_do_not_nest() -> None:
    timer = StageTimer(lambda: None)
    with (
        pytest.raises(AssertionError, match="stage reward began inside stage rollout"),
        timer.stage("rollout"),
        timer.stage("reward"),
    ):
        pass
    with pytest.raises(AssertionError, match="reset inside"), timer.stage("rollout"):
        timer.reset()
    with timer.stage("reward"):
        pass


def test_failed_stage_is_timed() -> None:
    timer = StageTimer(lambda: pytest.fail("waited for a device that may have failed"))
    with pytest.raises(RuntimeError), timer.stage("rollout") as lap:
        raise RuntimeError
    assert timer.seconds == {"rollout": lap.seconds}


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989), ("NVIDIA B200", 2250),
        ("NVIDIA GH200 480GB", None), ("NVIDIA GB200", None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None), ("cpu", None),
    ],
)  # fmt: skip
def test_peak_flops_of_devices(name: str, teraflops: float | None) -> None:
    assert peak_flops(name) == (None if teraflops is None else teraflops * 1e12)


def test_flops_by_hand() -> None:
    # Appendix B of the PaLM paper: 6 N + 12 L H Q T.
    assert training_flops_per_token(1000, layers=2, heads=3, head_dim=5, sequence_tokens=7) == 6000 + 12 * 2 * 3 * 5 * 7


def test_mfu_by_hand() -> None:
    assert mfu(1000.0, 989e9, devices=2, device_name="NVIDIA H200") == pytest.approx(0.5)
    assert mfu(1000.0, 989e9, devices=2, device_name="cpu") is None


def test_slow_rank_is_reported_at_intervals() -> None:
    stragglers = Stragglers()
    seconds = {"rollout": [6.0, 6.1, 5.9, 12.0], "forward": [3.0, 3.0, 3.0, 3.1]}
    (sentence,) = stragglers.observe(1, seconds)
    assert "rank 3 was the slowest in rollout with 12.0 seconds, half of the ranks took at most 6.0" in sentence
    assert not stragglers.observe(20, seconds)
    assert stragglers.observe(21, seconds)


def test_slower_of_two_ranks_is_reported() -> None:
    assert "rank 0" in Stragglers().observe(1, {"reward": [9.0, 2.0]})[0]


def test_small_differences_are_not_reported() -> None:
    stragglers = Stragglers()
    assert not stragglers.observe(1, {"reward": [0.1, 1.0], "rollout": [100.0, 120.0], "sync": [1.0]})
