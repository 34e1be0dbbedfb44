"""What a CPU's process does with memory that it has freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
