"""Function for the processes of a side in tests. The module has few imports, because each process imports this
module."""

from __future__ import annotations

from benchmarks.sides import Turns
from megappo.runtime.memory.allocator import keep_freed_memory


def two_steps(turns: Turns, first_step_bytes: int) -> None:
    """Run two steps. The first step allocates `first_step_bytes` in a process that keeps freed memory. A third step
    raises ValueError."""
    keep_freed_memory()
    turns.ready()
    for number in range(2):
        turns.wait()
        memory = bytearray(first_step_bytes) if number == 0 else b""
        metrics = {"number": float(number), "held": float(len(memory))}
        del memory
        turns.done(metrics)
    turns.wait()
    raise ValueError("two steps were promised")
