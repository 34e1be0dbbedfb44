"""Aggregation of token losses to one number. The weights include the global division.

The sum of weighted losses over microbatches and ranks is the loss of the global minibatch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, assert_never

if TYPE_CHECKING:  # settings use the choices without importing torch
    from torch import Tensor

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def token_weights(
    *,
    mask: Tensor,
    mode: Aggregation,
    total_tokens: int | None = None,
    total_sequences: int | None = None,
    norm_tokens: int | None = None,
) -> Tensor:
    """Return (B, T) float32 weights w such that the loss is the sum of w * token loss. Masked positions have weight
    0.

    `token-mean`: 1 / tokens. `seq-mean-token-sum`: 1 / sequences. `seq-mean-token-mean`: 1 / (sequences * tokens of
    the sequence). `seq-mean-token-sum-norm`: 1 / (sequences * norm_tokens), Liu et al. 2025, "Dr. GRPO".

    Args:
        mask: (B, T) bool, the part of the minibatch on this rank.
        total_tokens, total_sequences: Counts of the global minibatch (sequences with at least one valid token).
            Default: the counts of `mask`.
        norm_tokens: The constant of the last mode. Default: T.
    """
    tokens_B = mask.sum(-1)
    tokens = total_tokens if total_tokens is not None else int(tokens_B.sum())
    sequences = total_sequences if total_sequences is not None else int((tokens_B > 0).sum())
    tokens, sequences = max(tokens, 1), max(sequences, 1)
    weights = mask.float()
    match mode:
        case "token-mean":
            return weights / tokens
        case "seq-mean-token-sum":
            return weights / sequences
        case "seq-mean-token-mean":
            return weights / (sequences * tokens_B.clamp(min=1)[:, None])
        case "seq-mean-token-sum-norm":
            return weights / (sequences * (norm_tokens if norm_tokens is not None else mask.shape[-1]))
    assert_never(mode)
