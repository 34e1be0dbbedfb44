"""What a CPU's process does with memory that it has freed, and with that of its frames."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from megappo.runtime.heap import with_room_for_frames

CHILD = """
import resource, sys
import torch
from megappo.runtime.heap import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def used():
    some = [torch.ones(20 * 2**20, dtype=torch.uint8) for _ in range(4)]
    return torch.ones(50 * 2**20, dtype=torch.uint8), some

if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(10):  # until the heap has found its shape, which is another one each time
    used()
before = faults()
for _ in range(5):
    used()
print(faults() - before)
"""


def _faults(how: str) -> int:
    """Pages that the kernel gave to a process that needs 130 MiB five times."""
    done = subprocess.run([sys.executable, "-c", CHILD, how], capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is asked")
def test_freed_memory_is_used_again() -> None:
    """Without the request every tensor of more than 32 MiB, and the end of the heap, is given back and cleared anew."""
    given_back, kept = _faults("given back"), _faults("kept")
    assert given_back > 50_000
    assert kept < given_back / 4


@pytest.mark.parametrize(("starts", "slow"), [(lambda program: program(), True), (with_room_for_frames, False)])
def test_calls_need_no_new_memory_wherever_a_loop_stands(
    starts: Callable[[Callable[[], int]], int], slow: bool
) -> None:
    """In a thread, whose frames begin anew; there is a depth at which each call needs a page otherwise."""

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    def called() -> None:
        pass

    called.__code__ = called.__code__.replace(co_stacksize=100)  # larger than the frames of the loop

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
