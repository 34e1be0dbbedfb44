"""CISPO as a policy loss of your own (MiniMax 2025, "MiniMax-M1", eq. 4).

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
    """Every token keeps its slope: the ratio is a weight, bounded above and not differentiated.

    All tensors are (N,), one number for each token that counts.
    """
    ratio = log_ratio.detach().exp()
    loss = -ratio.clamp(max=1 + high) * advantages * logprob
    return loss, {"clipfrac": ratio > 1 + high}
