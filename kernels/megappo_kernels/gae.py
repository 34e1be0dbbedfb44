"""Generalised advantage estimation (Schulman et al. 2016, eq. 16) over masked, padded or packed sequences.

The recursion runs from the last token to the first. With m the mask, n the next value and g the running advantage:

    n' = (1-m) n + m v        g' = (1-m + m gamma lam) g + m gamma n + m (r - v)

Masked tokens are skipped without decay of values and rewards. With `borders`, gamma and lam are 1 except at borders,
such as the end of a turn. The tokens between two borders are then one time step. Each token is an affine map of (n,
g). Compositions of affine maps are affine maps, so the recursion is an associative scan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo_kernels.backend import runs_triton

_FEW_ROWS = 4096
"""Maximum number of concurrent rows for which rows are cut into pieces. The pieces are processed concurrently."""


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    borders: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return advantages (not whitened) and returns = advantages + values. Both are 0 for masked tokens.

    Args:
        rewards, values: float32 or float64; (B, T) padded, or (N,) packed sequences.
        mask: same shape, bool, or numbers in [0, 1] for tokens with fractional weight.
        gamma: discount.
        lam: trace decay; a number, or (B,) or (S,) with one number per sequence.
        bootstrap: (B,) or (S,) value of the state after the last token of each sequence. None: 0, for terminated
            sequences.
        borders: bool, same shape as the mask: tokens after which gamma and lam apply. None: all tokens.
        cu_seqlens: (S + 1,) int64 starts of the packed sequences, followed by N. None: padded sequences.

    Raises ValueError for inconsistent shapes. Masked positions may contain any value.
    """
    if rewards.shape != values.shape or mask.shape != values.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask {tuple(mask.shape)} differ in shape"
        )
    if borders is not None and (borders.shape != values.shape or borders.dtype != torch.bool):
        raise ValueError(f"borders is {borders.dtype} {tuple(borders.shape)}, must be bool {tuple(values.shape)}")
    if values.dim() != (2 if cu_seqlens is None else 1):
        raise ValueError(f"values has shape {tuple(values.shape)}; pass (B, T), or (N,) with cu_seqlens")
    sequences = len(values) if cu_seqlens is None else len(cu_seqlens) - 1
    if bootstrap is None:
        bootstrap = values.new_zeros(sequences)
    elif bootstrap.shape != (sequences,):
        raise ValueError(f"bootstrap has shape {tuple(bootstrap.shape)}, must be ({sequences},), one per sequence")
    if not isinstance(lam, Tensor):
        lam = torch.full((sequences,), lam, dtype=torch.float64, device=values.device)
    elif lam.shape != (sequences,):
        raise ValueError(f"lam has shape {tuple(lam.shape)}, must be a number or ({sequences},), one per sequence")
    valid = mask != 0
    rewards, values_clean = rewards.masked_fill(~valid, 0.0), values.masked_fill(~valid, 0.0)
    arguments = (rewards, values_clean, mask, borders, gamma, lam, bootstrap.to(values.dtype))
    if runs_triton(values):
        from megappo_kernels.gpu.gae import launch_gae

        advantages = launch_gae(*arguments, cu_seqlens)
    else:
        advantages = _padded(*arguments) if cu_seqlens is None else _packed(*arguments, cu_seqlens)
    advantages = advantages.masked_fill_(~valid, 0.0)
    return advantages, advantages + values_clean


def _packed(
    rewards_N: Tensor,
    values_N: Tensor,
    mask_N: Tensor,
    borders_N: Tensor | None,
    gamma: float,
    lam_S: Tensor,
    bootstrap_S: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """Compute GAE of packed sequences: pad to (S, longest sequence), left-aligned, and pack the result."""
    lengths_S = cu_seqlens.diff()
    if not len(lengths_S) or not len(values_N):
        return torch.zeros_like(values_N)
    positions_T = torch.arange(int(lengths_S.max()), device=values_N.device)
    inside_ST = positions_T < lengths_S[:, None]

    def unpack(packed_N: Tensor) -> Tensor:
        return packed_N.new_zeros(inside_ST.shape).masked_scatter_(inside_ST, packed_N)

    padded = (unpack(rewards_N), unpack(values_N), unpack(mask_N), None if borders_N is None else unpack(borders_N))
    return _padded(*padded, gamma, lam_S, bootstrap_S)[inside_ST]


def _padded(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    borders_BT: Tensor | None,
    gamma: float,
    lam_B: Tensor,
    bootstrap_B: Tensor,
) -> Tensor:
    if not values_BT.numel():
        return torch.zeros_like(values_BT)
    decay_B = (gamma * lam_B).to(values_BT.dtype)
    discount: float | Tensor = gamma
    if borders_BT is not None:
        discount = torch.where(borders_BT, gamma, torch.ones_like(values_BT))
    if mask_BT.dtype != torch.bool:
        decay = decay_B if borders_BT is None else torch.where(borders_BT, decay_B[:, None], 1.0).T
        return _steps(rewards_BT, values_BT, mask_BT, discount, decay, bootstrap_B)
    deltas_BT = rewards_BT + discount * _next_values(values_BT, mask_BT, bootstrap_B) - values_BT
    deltas_BT = deltas_BT.masked_fill_(~mask_BT, 0.0)
    return _decayed_sums(deltas_BT, mask_BT if borders_BT is None else mask_BT & borders_BT, decay_B)


def _steps(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    discount: float | Tensor,
    decay: Tensor,
    bootstrap_B: Tensor,
) -> Tensor:
    """Run the recursion for fractional masks step by step. The (T, B) layout makes the memory of each step
    contiguous.

    `discount`: a number, or (B, T); `decay`: (B,) or (T, B).
    """
    mask_TB = mask_BT.to(values_BT.dtype).T.contiguous()
    values_TB = values_BT.T.contiguous()
    surplus_TB = (rewards_BT - values_BT).T * mask_TB
    reach_TB = mask_TB * (discount.T if isinstance(discount, Tensor) else discount)
    decay_TB = 1 - mask_TB + mask_TB * decay
    advantages_TB = torch.empty_like(values_TB)
    following_B, running_B = bootstrap_B.clone(), torch.zeros_like(bootstrap_B)
    for t in range(len(values_TB) - 1, -1, -1):
        torch.addcmul(surplus_TB[t], reach_TB[t], following_B, out=advantages_TB[t])
        running_B = advantages_TB[t].addcmul_(decay_TB[t], running_B)
        following_B = torch.lerp(following_B, values_TB[t], mask_TB[t])
    return advantages_TB.T.contiguous()


def _next_values(values_BT: Tensor, mask_BT: Tensor, bootstrap_B: Tensor) -> Tensor:
    """Return the value of the next valid token after each position, or the bootstrap value."""
    rows, length = values_BT.shape
    extended = torch.cat([values_BT, bootstrap_B[:, None]], dim=1)
    positions_T = torch.arange(1, length, device=values_BT.device, dtype=torch.int32)
    # Position t searches from t + 1. In reversed order, the nearest valid position is a running minimum.
    valid_from = torch.full((rows, length), length, device=values_BT.device, dtype=torch.int32)
    valid_from[:, :-1] = torch.where(mask_BT[:, 1:], positions_T, length)
    nearest = valid_from.flip(1).cummin(1).values.flip(1)
    return extended.gather(1, nearest.long())


def _decayed_sums(deltas_BT: Tensor, mask_BT: Tensor, decay_B: Tensor) -> Tensor:
    """Compute g_t = (decay where the mask is True, else 1) * g_{t+1} + delta_t, from the right.

    Rows are cut into pieces of about sqrt(T) tokens. All pieces are processed concurrently, one token at a time.
    Carries are then passed from piece to piece. Each position adds the carry of its piece times the decay of the
    tokens in between.
    """
    rows, length = deltas_BT.shape
    piece = max(1, round(length**0.5)) if rows <= _FEW_ROWS else length
    pieces = -(-length // piece)
    missing = pieces * piece - length
    if missing:
        deltas_BT = torch.nn.functional.pad(deltas_BT, (0, missing))
        mask_BT = torch.nn.functional.pad(mask_BT, (0, missing))
    # (piece, pieces, B): the memory of a step over all pieces is contiguous.
    sums_LKB = deltas_BT.view(rows, pieces, piece).permute(2, 1, 0).contiguous()
    mask_LKB = mask_BT.view(rows, pieces, piece).permute(2, 1, 0).contiguous()
    factors_LKB = torch.where(mask_LKB, decay_B, 1.0)
    for i in range(piece - 2, -1, -1):
        sums_LKB[i].addcmul_(factors_LKB[i], sums_LKB[i + 1])
        # In the next loop, the factor becomes the decay from this token to the end of its piece.
    if pieces > 1:
        for i in range(piece - 2, -1, -1):
            factors_LKB[i].mul_(factors_LKB[i + 1])
        carries_KB = torch.zeros_like(sums_LKB[0])
        for k in range(pieces - 2, -1, -1):
            torch.addcmul(sums_LKB[0, k + 1], factors_LKB[0, k + 1], carries_KB[k + 1], out=carries_KB[k])
        sums_LKB.addcmul_(factors_LKB, carries_KB)
    return sums_LKB.permute(2, 1, 0).reshape(rows, pieces * piece)[:, :length].contiguous()
