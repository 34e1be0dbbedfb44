"""Seconds per stage, and the fraction of the peak performance (MFU)."""

import time

import pytest

from megappo.observe.stopwatch import StageTimer
from megappo.observe.throughput import mfu, peak_flops, training_flops_per_token


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
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_peak_flops_of_devices(name: str, teraflops: float | None) -> None:
    assert peak_flops(name) == (None if teraflops is None else teraflops * 1e12)


def test_flops_by_hand() -> None:
    # Appendix B of the PaLM paper: 6 N + 12 L H Q T.
    assert training_flops_per_token(1000, layers=2, heads=3, head_dim=5, sequence_tokens=7) == 6000 + 12 * 2 * 3 * 5 * 7


def test_mfu_by_hand() -> None:
    assert mfu(1000.0, 989e9, devices=2, device_name="NVIDIA H200") == pytest.approx(0.5)
    assert mfu(1000.0, 989e9, devices=2, device_name="cpu") is None
