"""Sums, for the quickstart and for trying things out."""

from __future__ import annotations

from collections.abc import Iterator


def sums(*, max_operand: int, template: str = "{a}+{b}=", modulus: int | None = None) -> Iterator[dict[str, str]]:
    """Every pair 0 <= a, b <= max_operand once, with its sum (modulo `modulus`) as the answer."""
    for a in range(max_operand + 1):
        for b in range(max_operand + 1):
            total = a + b if modulus is None else (a + b) % modulus
            yield {"prompt": template.format(a=a, b=b), "answer": str(total)}
