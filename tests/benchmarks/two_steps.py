"""What the processes of a side run in tests; it imports next to nothing, as each of them starts with it."""

from __future__ import annotations

from benchmarks.sides import Turns
from megappo.runtime.heap import keep_freed_memory


def two_steps(turns: Turns, held_bytes: int) -> None:
    """The first of them holds so much memory, in a process that keeps what is freed; there is no third."""
    keep_freed_memory()
    turns.ready()
    for number in range(2):
        turns.wait()
        held = bytearray(held_bytes) if number == 0 else b""
        told = {"number": float(number), "held": float(len(held))}
        del held
        turns.done(told)
    turns.wait()
    raise ValueError("two steps were promised")
