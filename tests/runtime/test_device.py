"""Calls of the allocator of torch and of the driver of a GPU, which are replaced by mocks, and threads of a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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
from tests.support.places import ROOT
from tests.support.worlds import environment

T = TypeVar("T")
ON_A_GPU = Runtime(rank=0, world_size=2, local_rank=0, device=torch.device("cuda", 0))


@pytest.fixture
def allocator_settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of settings that the allocator receives."""
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return settings


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_shared_memory_uses_plain_segments(
    name: str, allocator_settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128, expandable_segments:True")
    with pytest.raises(RuntimeError, match="out of memory"), plain_segments():
        assert allocator_settings == ["expandable_segments:False"]
        raise RuntimeError("out of memory")
    assert allocator_settings == ["expandable_segments:False", "expandable_segments:True"]


@pytest.mark.parametrize("options", ["", "expandable_segments:False", "max_split_size_mb:128"])
def test_other_allocator_options_are_not_changed(
    options: str, allocator_settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", options)
    with plain_segments():
        pass
    assert allocator_settings == []


def test_options_of_the_allocator() -> None:
    assert allocator_options(" a:1,b : [256:1,>:4], ") == {"a": "1", "b": "[256:1", ">": "4]"}


def queries_of_free_memory(monkeypatch: pytest.MonkeyPatch, free: list[int]) -> int:
    """Return the number of queries for a driver that reports these values of free memory. The last value repeats."""
    answers: list[int] = []

    def look() -> tuple[int, int]:
        answers.append(free[min(len(answers), len(free) - 1)])
        return answers[-1], 100

    monkeypatch.setattr(torch.cuda, "mem_get_info", look)
    assert ON_A_GPU.await_freed_memory()
    return len(answers)


def test_wait_for_memory_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends when free memory no longer grows."""
    assert queries_of_free_memory(monkeypatch, [40]) == 2
    assert queries_of_free_memory(monkeypatch, [10, 20, 40, 70, 70]) == 5
    assert Runtime(rank=0, world_size=1, local_rank=0, device=torch.device("cpu")).await_freed_memory()


def test_memory_peak_is_reset_after_each_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak applies to GPUs. On a CPU, the current memory of the process is returned."""
    peaks, resets = iter([3e9, 1e9]), list[str]()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append("reset"))
    assert (ON_A_GPU.peak_since(), resets) == (3.0, ["reset"])
    assert (ON_A_GPU.peak_since(), resets) == (1.0, ["reset", "reset"])
    on_a_cpu = Runtime(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
    assert on_a_cpu.peak_since() == pytest.approx(psutil.Process().memory_info().rss / 1e9, rel=0.05)


def test_wait_for_memory_has_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    growing = iter(range(10**9))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(growing), 100))
    assert not ON_A_GPU.await_freed_memory(0.1)


on_linux = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")


def in_a_thread(work: Callable[[], T]) -> T:
    """Run a function in a thread with its own scheduling policy. Return the result."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


@on_linux
@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_ranks_on_a_cpu_use_the_batch_policy() -> None:
    def prepared() -> list[int]:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        prepare_device(RuntimeSettings(device="cpu"), Ranks(0, 1, 0, 1))
        return [os.sched_getscheduler(0), in_a_thread(lambda: os.sched_getscheduler(0))]

    assert in_a_thread(prepared) == [os.SCHED_BATCH] * 2


@on_linux
def test_selected_scheduling_policy_is_not_changed() -> None:
    def shared() -> int:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        share_cores()
        return os.sched_getscheduler(0)

    assert in_a_thread(shared) == os.SCHED_IDLE


@on_linux
def test_forbidden_scheduling_policy_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = Mock(side_effect=PermissionError)

    def shared() -> None:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        monkeypatch.setattr(os, "sched_setscheduler", forbidden)
        share_cores()

    in_a_thread(shared)
    forbidden.assert_called_once()


def openmp_settings(command: list[str], **variables: str) -> dict[str, str]:
    """Return the settings that the OpenMP library of torch prints when a process loads the library. `GOMP_SPINCOUNT`
    is the number of checks before a waiting thread releases its core."""
    inherited = {k: v for k, v in environment().items() if not k.startswith(("OMP_", "KMP_", "GOMP_"))}
    variables_of_process = inherited | {"OMP_DISPLAY_ENV": "verbose"} | variables
    done = subprocess.run(command, env=variables_of_process, capture_output=True, text=True, timeout=120, check=True)
    return dict(re.findall(r"(G?OMP_\w+)\s*=\s*'([^']*)'", done.stderr))


@pytest.mark.waits
@pytest.mark.parametrize("code", ["import megappo, torch", "import megappo.api; megappo.api.load_config; import torch"])
def test_threads_wait_passively(code: str) -> None:
    """The number of threads does not change."""
    settings = openmp_settings([sys.executable, "-c", code], OMP_NUM_THREADS="3")
    assert (settings["GOMP_SPINCOUNT"], settings["OMP_NUM_THREADS"]) == ("0", "3")


@pytest.mark.waits
def test_policy_of_the_user_is_not_changed() -> None:
    settings = openmp_settings([sys.executable, "-c", "import megappo, torch"], OMP_WAIT_POLICY="active")
    assert int(settings["GOMP_SPINCOUNT"]) > 10**6


@pytest.mark.waits
def test_launch_python_sets_the_policy_for_scripts() -> None:
    """This includes scripts that import torch before megappo."""
    own = {"MEGAPPO_PYTHON": sys.executable, "PATH": os.environ["PATH"]}
    settings = openmp_settings([str(ROOT / "launch" / "python"), "-c", "import torch"], **own)
    assert settings["GOMP_SPINCOUNT"] == "0"
