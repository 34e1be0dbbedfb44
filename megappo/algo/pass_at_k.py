"""Estimate of pass@k, the probability that at least one of k responses to a prompt is correct (Chen et al. 2021,
"Evaluating Large Language Models Trained on Code", equation 1). The estimate uses n responses."""

from __future__ import annotations

from math import comb


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate 1 - C(n - c, k) / C(n, k) for n samples with c correct samples. Integers are exact
    up to the division.

    `k` is from 1 to `samples`.
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)
