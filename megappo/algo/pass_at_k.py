"""How probable it is that one of k answers to a prompt is right, from n of them (Chen et al. 2021, "Evaluating Large
Language Models Trained on Code", equation 1)."""

from __future__ import annotations

from math import comb


def pass_at_k(samples: int, right: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k) for n samples of which c are right, without bias; whole numbers up to the division.

    `k` is from 1 to `samples`.
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)
