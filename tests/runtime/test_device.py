"""What is asked of torch's allocator and of a GPU's driver, with both played by the test."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from unittest.mock import Mock

import psutil
import pytest
import torch

from megappo.config.schema import RuntimeSettings
from megappo.runtime.device import allocator_options, plain_segments, prepare_device, share_cores
from megappo.runtime.launchers import Ranks
from megappo.runtime.process import Runtime

T = TypeVar("T")
ON_A_GPU = Runtime(rank=0, world_size=2, local_rank=0, device=torch.device("cuda", 0))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator was told."""
    found: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_for_other_processes_lies_in_no_expandable_segment(
    name: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128, expandable_segments:True")
    with pytest.raises(RuntimeError, match="out of memory"), plain_segments():
        assert told == ["expandable_segments:False"]
        raise RuntimeError("out of memory")
    assert told == ["expandable_segments:False", "expandable_segments:True"]


@pytest.mark.parametrize("options", ["", "expandable_segments:False", "max_split_size_mb:128"])
def test_an_allocator_without_them_is_left_alone(
    options: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", options)
    with plain_segments():
        pass
    assert told == []


def test_options_of_the_allocator() -> None:
    assert allocator_options(" a:1,b : [256:1,>:4], ") == {"a": "1", "b": "[256:1", ">": "4]"}


def freed(monkeypatch: pytest.MonkeyPatch, free: list[int]) -> int:
    """How often the driver is asked while it says these numbers one after the other, the last one ever after."""
    asked: list[int] = []

    def look() -> tuple[int, int]:
        asked.append(free[min(len(asked), len(free) - 1)])
        return asked[-1], 100

    monkeypatch.setattr(torch.cuda, "mem_get_info", look)
    assert ON_A_GPU.await_freed_memory()
    return len(asked)


def test_memory_that_others_give_back_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it grows no more."""
    assert freed(monkeypatch, [40]) == 2
    assert freed(monkeypatch, [10, 20, 40, 70, 70]) == 5
    assert Runtime(rank=0, world_size=1, local_rank=0, device=torch.device("cpu")).await_freed_memory()


def test_a_peak_is_of_what_lies_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; a CPU has what the process has now."""
    peaks, resets = iter([3e9, 1e9]), list[str]()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append("reset"))
    assert (ON_A_GPU.peak_since(), resets) == (3.0, ["reset"])
    assert (ON_A_GPU.peak_since(), resets) == (1.0, ["reset", "reset"])
    on_a_cpu = Runtime(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
    assert on_a_cpu.peak_since() == pytest.approx(psutil.Process().memory_info().rss / 1e9, rel=0.05)


def test_a_wait_for_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    growing = iter(range(10**9))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(growing), 100))
    assert not ON_A_GPU.await_freed_memory(0.1)


on_linux = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")


def in_a_thread(work: Callable[[], T]) -> T:
    """What it returns; its policy is that of the thread alone."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


@on_linux
@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_ranks_on_a_cpu_and_what_they_start_wait_for_their_turn() -> None:
    def prepared() -> list[int]:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        prepare_device(RuntimeSettings(device="cpu"), Ranks(0, 1, 0, 1))
        return [os.sched_getscheduler(0), in_a_thread(lambda: os.sched_getscheduler(0))]

    assert in_a_thread(prepared) == [os.SCHED_BATCH] * 2


@on_linux
def test_a_policy_that_was_chosen_stays() -> None:
    def shared() -> int:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        share_cores()
        return os.sched_getscheduler(0)

    assert in_a_thread(shared) == os.SCHED_IDLE


@on_linux
def test_a_sandbox_may_forbid_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = Mock(side_effect=PermissionError)

    def shared() -> None:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        monkeypatch.setattr(os, "sched_setscheduler", forbidden)
        share_cores()

    in_a_thread(shared)
    forbidden.assert_called_once()
