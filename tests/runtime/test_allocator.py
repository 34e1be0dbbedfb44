"""Reuse of freed memory and of stack frames in a process on a CPU."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from megappo.runtime.memory.allocator import with_room_for_frames

CHILD = """
import resource, sys
import torch
from megappo.runtime.memory.allocator import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def used():
    some = [torch.ones(20 * 2**20, dtype=torch.uint8) for _ in range(4)]
    return torch.ones(50 * 2**20, dtype=torch.uint8), some

if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(10):  # until the heap reaches a stable state, which differs between runs
    used()
before = faults()
for _ in range(5):
    used()
print(faults() - before)
"""


def _faults(mode: str) -> int:
    """Return the page faults of a process that allocates 130 MiB five times."""
    done = subprocess.run([sys.executable, "-c", CHILD, mode], capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_freed_memory_is_reused() -> None:
    """Without the setting, tensors above 32 MiB and the end of the heap are returned to the system and cleared
    again."""
    with_release, with_keep = _faults("release"), _faults("keep")
    assert with_release > 50_000
    assert with_keep < with_release / 4


@pytest.mark.parametrize(("starts", "slow"), [(lambda program: program(), True), (with_room_for_frames, False)])
def test_calls_need_no_new_memory_at_any_depth(starts: Callable[[Callable[[], int]], int], slow: bool) -> None:
    """In a new thread, there is otherwise a stack depth at which each call needs a new page."""

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    def called() -> None:
        pass

    called.__code__ = called.__code__.replace(co_stacksize=100)  # larger than the stack frames of the loop

    def loop(depth: int) -> int:
        if depth:
            return loop(depth - 1)
        before = faults()
        for _ in range(100):
            called()
        return faults() - before

    def program() -> int:
        return max(loop(depth) for depth in range(400))

    with ThreadPoolExecutor(1) as thread:
        assert (thread.submit(starts, program).result() >= 100) == slow
