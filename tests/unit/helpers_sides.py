"""What the processes of a side run in tests; it imports next to nothing, as each of them starts with it."""

from __future__ import annotations

from benchmarks.sides import Turns


def two_steps(turns: Turns, held_bytes: int) -> None:
    """The first of them holds so much memory; there is no third."""
    turns.ready()
    for number in range(2):
        turns.wait()
        held = bytearray(held_bytes) if number == 0 else b""
        turns.done({"number": float(number), "held": float(len(held))})
        del held
    turns.wait()
    raise ValueError("two steps were promised")
