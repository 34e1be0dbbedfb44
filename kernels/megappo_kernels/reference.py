"""The obviously right version of every kernel, in whatever precision its inputs have."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_logprob(
    hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each row under softmax(hidden @ weight.T / temperature)."""
    logp_TV = torch.log_softmax(hidden_TH @ weight_VH.T / temperature, dim=-1)
    logprob_T = logp_TV.gather(-1, labels_T[:, None]).squeeze(-1)
    return logprob_T, -(logp_TV.exp() * logp_TV).sum(-1)
