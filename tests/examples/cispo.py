"""CISPO as a custom policy loss (MiniMax 2025, "MiniMax-M1", eq. 4).

algorithm:
  policy_loss: tests.examples.cispo:cispo
  policy_loss_options: {high: 0.28}
  dual_clip: null
"""

from __future__ import annotations

from torch import Tensor


def cispo(
    *, logprob: Tensor, log_ratio: Tensor, advantages: Tensor, high: float = 0.28
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a loss in which every token keeps its gradient. The ratio is a weight with an upper bound and without
    gradient.

    All tensors are (N,), one number per token in the loss.
    """
    ratio = log_ratio.detach().exp()
    loss = -ratio.clamp(max=1 + high) * advantages * logprob
    return loss, {"clipfrac": ratio > 1 + high}
