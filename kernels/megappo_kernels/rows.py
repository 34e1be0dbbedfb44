"""Softmax statistics of rows of logits, and their combination over a split vocabulary. `softmax` computes them.

Shape legend: T rows (tokens), C rows of a block, V vocabulary rows on this rank, W columns of a slice, R parts.

For each row, with z the scaled logits: m = max z, s = sum e^(z-m), u = sum e^(z-m) (z-m), and t = z of the label. t
is -inf if another rank has the label. Parts of a row are combined exactly. With M, S, U of the whole vocabulary,

    logprob = t - M - log S            entropy = log S - U/S
    dz_j    = [g_l (1[j=y] - p_j) - g_H p_j (z_j - M - U/S)] d(scaled)/d(logit),   p_j = e^(z_j-M) / S

The shifted form of the entropy has no cancellation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

EXCLUDED = -1e30
"""Logit of an excluded token. Its probability and its gradient are 0. A soft cap does not change this logit."""


@dataclass(frozen=True)
class Exclusion:
    """Tokens that the distributions of some rows exclude, as in an engine that does not sample these tokens."""

    rows_T: Tensor
    """(T,) bool: rows with excluded tokens."""
    token_ids: tuple[int, ...]
    """Excluded tokens, as ids of the whole vocabulary."""

    def of_labels(self, labels_T: Tensor) -> Exclusion:
        """Return the exclusion without rows whose label is an excluded token. These labels were sampled from the
        whole vocabulary."""
        rows_T = self.rows_T
        for token_id in self.token_ids:
            rows_T = rows_T & (labels_T != token_id)
        return Exclusion(rows_T, self.token_ids)

    def of_rows(self, rows: slice | Tensor) -> Exclusion:
        """Return the exclusion of some of the rows."""
        return Exclusion(self.rows_T[rows], self.token_ids)

    def apply_(self, logits_CW: Tensor, first: int) -> None:
        """Overwrite the logits of excluded tokens. `first`: token id of the first column."""
        for token_id in self.token_ids:
            if first <= token_id < first + logits_CW.shape[1]:
                logits_CW[:, token_id - first].masked_fill_(self.rows_T, EXCLUDED)


@dataclass(frozen=True)
class Scaling:
    """Scaling of logits: soft cap (cap * tanh(z / cap)), then temperature."""

    inverse_temperature: float | Tensor
    """A number, or (T,) with the dtype of the logits' statistics."""
    softcap: float | None

    @staticmethod
    def of(temperature: float | Tensor, softcap: float | None, rows: int, like: Tensor) -> Scaling:
        """Return the scaling with the inverse temperature. Raises ValueError for values that are not positive."""
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap is {softcap}, must be positive; pass None for no cap")
        if isinstance(temperature, Tensor):
            if temperature.shape != (rows,):
                raise ValueError(f"temperature has shape {tuple(temperature.shape)}, must be a number or ({rows},)")
            dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
            return Scaling(temperature.detach().to(dtype).reciprocal(), softcap)
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, must be positive")
        return Scaling(1.0 / temperature, softcap)

    def of_rows(self, rows: slice | Tensor) -> Scaling:
        """Return the scaling of some of the rows."""
        if isinstance(self.inverse_temperature, Tensor):
            return Scaling(self.inverse_temperature[rows], self.softcap)
        return self

    def column(self) -> float | Tensor:
        """Return the factor in a shape that broadcasts to (C, W)."""
        factor = self.inverse_temperature
        return factor[:, None] if isinstance(factor, Tensor) else factor

    @property
    def is_identity(self) -> bool:
        """Whether scaling does not change the logits."""
        factor = self.inverse_temperature
        return self.softcap is None and not isinstance(factor, Tensor) and factor == 1.0

    def scale_(self, logits_CW: Tensor) -> Tensor:
        """Scale logits (C, W) in place and return them."""
        if self.softcap is not None:
            excluded_CW = logits_CW <= EXCLUDED
            logits_CW.div_(self.softcap).tanh_().mul_(self.softcap).masked_fill_(excluded_CW, EXCLUDED)
        return logits_CW.mul_(self.column())


@dataclass(frozen=True)
class RowGradients:
    """Inputs of the gradient of logits, except the logits; all (C,)."""

    max_C: Tensor
    sum_C: Tensor
    weighted_C: Tensor
    logprob_C: Tensor
    """Upstream gradient of the log-probability."""
    entropy_C: Tensor | None
    """Upstream gradient of the entropy, or None."""

    @staticmethod
    def of(stats_4C: Tensor, logprob_C: Tensor | None, entropy_C: Tensor | None) -> RowGradients:
        """Combine the statistics of the whole vocabulary with the upstream gradients. None: no gradient."""
        max_C, sum_C, weighted_C, _ = stats_4C.unbind(0)
        logprob_C = torch.zeros_like(max_C) if logprob_C is None else logprob_C
        return RowGradients(max_C, sum_C, weighted_C, logprob_C, entropy_C)

    def of_rows(self, rows: slice | Tensor) -> RowGradients:
        """Return the inputs for some of the rows."""
        entropy_C = self.entropy_C[rows] if self.entropy_C is not None else None
        return RowGradients(self.max_C[rows], self.sum_C[rows], self.weighted_C[rows], self.logprob_C[rows], entropy_C)


def empty_statistics(rows: int, like: Tensor) -> Tensor:
    """Return (4, rows) statistics m, s, u, t of zero columns, in float32 (float64 for float64)."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    stats_4T = torch.zeros(4, rows, dtype=dtype, device=like.device)
    stats_4T[0] = stats_4T[3] = -torch.inf
    return stats_4T


def merge_statistics(stats_4T: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Combine the statistics of all ranks to the (4, T) statistics of the whole vocabulary.

    The combination requires one all-gather of 16 bytes per row. Sums are in the order of ranks, so all ranks have
    bitwise equal results.
    """
    if group is None:
        return stats_4T
    gathered = [torch.empty_like(stats_4T) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, stats_4T.contiguous(), group=group)
    return merge_parts(torch.stack(gathered))


def merge_parts(stats_R4T: Tensor) -> Tensor:
    """Combine statistics of parts of the vocabulary: (R, 4, T) -> (4, T)."""
    max_T = stats_R4T[:, 0].amax(0)
    shift_RT = stats_R4T[:, 0] - max_T
    scale_RT = shift_RT.exp()
    # A part without valid vocabulary has m = -inf and s = u = 0. Its products must be 0 instead of NaN.
    shift_RT.masked_fill_(stats_R4T[:, 0] == -torch.inf, 0.0)
    sum_T = (scale_RT * stats_R4T[:, 1]).sum(0)
    weighted_T = (scale_RT * (stats_R4T[:, 2] + shift_RT * stats_R4T[:, 1])).sum(0)
    return torch.stack([max_T, sum_T, weighted_T, stats_R4T[:, 3].amax(0)])


def logprob_and_entropy(stats_4T: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor]:
    """Return (logprob_T <= 0, entropy_T >= 0) in nats from the statistics of the whole vocabulary. Without
    `entropy`, the entropies are zeros."""
    max_T, sum_T, weighted_T, target_T = stats_4T.unbind(0)
    log_sum_T = sum_T.log()
    logprob_T = (target_T - max_T - log_sum_T).clamp_(max=0.0)
    entropy_T = (log_sum_T - weighted_T / sum_T).clamp_(min=0.0) if entropy else torch.zeros_like(sum_T)
    return logprob_T, entropy_T
