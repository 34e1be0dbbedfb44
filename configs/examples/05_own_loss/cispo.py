"""The policy loss of CISPO (MiniMax 2025, "MiniMax-M1", eq. 4)."""

from __future__ import annotations

from torch import Tensor


def cispo(
    *, logprob: Tensor, log_ratio: Tensor, advantages: Tensor, high: float = 0.28
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the metrics of each token, (N,).

    The ratio is a constant weight with an upper bound, so every token has a gradient.
    """
    ratio = log_ratio.detach().exp()
    loss = -ratio.clamp(max=1 + high) * advantages * logprob
    return loss, {"clipfrac": ratio > 1 + high}
