"""pass@k: the probability that one of k responses to a prompt is right, estimated from n of them (Chen et al. 2021,
"Evaluating Large Language Models Trained on Code", equation 1)."""

from __future__ import annotations

from math import comb


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate 1 - C(n - c, k) / C(n, k) for n samples of which c are right; exact integers up to the
    division.

    `k` is from 1 to `samples`.
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)
