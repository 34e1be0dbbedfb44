"""What is done to each row of logits: softmax statistics, their merger over a split vocabulary, and the gradient.

Shape legend: T rows (tokens), C rows of a block, V vocabulary rows on this rank, W columns of a slice, R parts.

Per row, with z the scaled logits: m = max z, s = sum e^(z-m), u = sum e^(z-m) (z-m), t = the label's z, or -inf where
the label lives elsewhere. Parts of a row merge exactly, and then, M, S, U being those of the whole vocabulary,

    logprob = t - M - log S            entropy = log S - U/S
    dz_j    = [g_l (1[j=y] - p_j) - g_H p_j (z_j - M - U/S)] d(scaled)/d(logit),   p_j = e^(z_j-M) / S

The shifted form of the entropy has no cancellation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """From logits to scaled logits: soft cap (cap * tanh(z / cap)), then temperature."""

    inverse_temperature: float | Tensor
    """A number, or (T,) in the precision of the logits."""
    softcap: float | None

    @staticmethod
    def of(temperature: float | Tensor, softcap: float | None, rows: int, like: Tensor) -> Scaling:
        """Check and invert; raises ValueError for what is not positive."""
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
        """That of some of the rows."""
        if isinstance(self.inverse_temperature, Tensor):
            return Scaling(self.inverse_temperature[rows], self.softcap)
        return self

    def column(self) -> float | Tensor:
        """The factor in a shape that multiplies (C, W)."""
        factor = self.inverse_temperature
        return factor[:, None] if isinstance(factor, Tensor) else factor

    @property
    def is_identity(self) -> bool:
        """Whether scaled logits are the logits."""
        factor = self.inverse_temperature
        return self.softcap is None and not isinstance(factor, Tensor) and factor == 1.0

    def scale_(self, logits_CW: Tensor) -> Tensor:
        """In place."""
        if self.softcap is not None:
            logits_CW.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_CW.mul_(self.column())


@dataclass(frozen=True)
class RowGradients:
    """What the gradient of a row of logits depends on besides the logits; all (C,)."""

    max_C: Tensor
    sum_C: Tensor
    weighted_C: Tensor
    logprob_C: Tensor
    """Upstream gradient of the log-probability."""
    entropy_C: Tensor | None
    """Upstream gradient of the entropy; None: there is none."""

    @staticmethod
    def of(stats_4C: Tensor, logprob_C: Tensor, entropy_C: Tensor | None) -> RowGradients:
        """From the statistics of the whole vocabulary and the upstream gradients."""
        max_C, sum_C, weighted_C, _ = stats_4C.unbind(0)
        return RowGradients(max_C, sum_C, weighted_C, logprob_C, entropy_C)

    def of_rows(self, rows: slice | Tensor) -> RowGradients:
        """Those of some of the rows."""
        entropy_C = self.entropy_C[rows] if self.entropy_C is not None else None
        return RowGradients(self.max_C[rows], self.sum_C[rows], self.weighted_C[rows], self.logprob_C[rows], entropy_C)


def empty_statistics(rows: int, like: Tensor) -> Tensor:
    """(4, rows): m, s, u, t of no columns at all, in float32 (float64 for float64)."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    stats_4T = torch.zeros(4, rows, dtype=dtype, device=like.device)
    stats_4T[0] = stats_4T[3] = -torch.inf
    return stats_4T


def update_statistics(
    stats_4C: Tensor,
    logits_CW: Tensor,
    labels_C: Tensor,
    scaling: Scaling,
    *,
    entropy: bool,
    scratch: tuple[Tensor, Tensor] | None = None,
    triton: bool = False,
) -> None:
    """Add a slice of columns to the statistics in place.

    Args:
        stats_4C: what `empty_statistics` or an earlier call left.
        logits_CW: float32 or float64; kept only with `scratch`.
        labels_C: int64, counted from the first column of the slice; those outside the slice have their logit elsewhere.
        scaling: of these rows.
        entropy: whether u is wanted.
        scratch: two flat buffers for the work, else it is done in `logits_CW`.
        triton: whether to run the Triton kernel, which needs no buffers and leaves the logits alone.
    """
    if triton:
        from megappo_kernels.gpu.rows import launch_statistics

        launch_statistics(stats_4C, logits_CW, labels_C, scaling, entropy=entropy)
        return
    max_C, sum_C, weighted_C, target_C = stats_4C.unbind(0)
    shape, size = logits_CW.shape, logits_CW.numel()
    work_CW = logits_CW if scratch is None else scratch[0][:size].view(shape)
    if scaling.softcap is None and isinstance(scaling.inverse_temperature, float):
        factor = scaling.inverse_temperature
        found_C = _at_labels(logits_CW, labels_C).to(max_C.dtype) * factor
        new_C = torch.maximum(max_C, logits_CW.amax(-1) * factor)
        shifted_CW = torch.add(-new_C[:, None], logits_CW, alpha=factor, out=work_CW)
    else:
        scaled_CW = scaling.scale_(work_CW if work_CW is logits_CW else work_CW.copy_(logits_CW))
        found_C = _at_labels(scaled_CW, labels_C)
        new_C = torch.maximum(max_C, scaled_CW.amax(-1))
        shifted_CW = scaled_CW.sub_(new_C[:, None])
    here_C = (labels_C >= 0) & (labels_C < shape[1])
    torch.where(here_C, found_C, target_C, out=target_C)
    # Before the first slice m is -inf and s is 0: their product must be 0, not NaN.
    shift_C = (max_C - new_C).masked_fill_(max_C == -torch.inf, 0.0)
    scale_C = shift_C.exp()
    if entropy:
        weighted_C.add_(shift_C.mul_(sum_C)).mul_(scale_C)
        exp_CW = torch.exp(shifted_CW) if scratch is None else torch.exp(shifted_CW, out=scratch[1][:size].view(shape))
        sum_C.mul_(scale_C).add_(exp_CW.sum(-1))
        weighted_C.add_(exp_CW.mul_(shifted_CW).sum(-1))
    else:
        sum_C.mul_(scale_C).add_(shifted_CW.exp_().sum(-1))
    max_C.copy_(new_C)


def _at_labels(values_CW: Tensor, labels_C: Tensor) -> Tensor:
    """(C,) the values at the labels, anything where a label lies outside."""
    return values_CW.gather(1, labels_C.clamp(0, values_CW.shape[1] - 1)[:, None]).squeeze(1)


def merge_statistics(stats_4T: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The (4, T) statistics of the whole vocabulary from those of each rank, by one all-gather of 16 bytes a row.

    The order of ranks fixes the order of sums, so every rank gets the same bits.
    """
    if group is None:
        return stats_4T
    gathered = [torch.empty_like(stats_4T) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, stats_4T.contiguous(), group=group)
    return merge_parts(torch.stack(gathered))


def merge_parts(stats_R4T: Tensor) -> Tensor:
    """(R, 4, T) statistics of parts of the vocabulary -> (4, T) of their union."""
    max_T = stats_R4T[:, 0].amax(0)
    shift_RT = stats_R4T[:, 0] - max_T
    scale_RT = shift_RT.exp()
    # A part without valid vocabulary has m = -inf, s = u = 0: its products must be 0, not NaN.
    shift_RT.masked_fill_(stats_R4T[:, 0] == -torch.inf, 0.0)
    sum_T = (scale_RT * stats_R4T[:, 1]).sum(0)
    weighted_T = (scale_RT * (stats_R4T[:, 2] + shift_RT * stats_R4T[:, 1])).sum(0)
    return torch.stack([max_T, sum_T, weighted_T, stats_R4T[:, 3].amax(0)])


def logprob_and_entropy(stats_4T: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor]:
    """(logprob_T <= 0, entropy_T >= 0) in nats from the statistics of the whole vocabulary; zeros without entropy."""
    max_T, sum_T, weighted_T, target_T = stats_4T.unbind(0)
    log_sum_T = sum_T.log()
    logprob_T = (target_T - max_T - log_sum_T).clamp_(max=0.0)
    entropy_T = (log_sum_T - weighted_T / sum_T).clamp_(min=0.0) if entropy else torch.zeros_like(sum_T)
    return logprob_T, entropy_T


def logits_gradient(
    logits_CW: Tensor,
    labels_C: Tensor,
    rows: RowGradients,
    scaling: Scaling,
    out_CW: Tensor,
    *,
    triton: bool = False,
) -> Tensor:
    """Write the gradient of the logits to `out_CW`; returns it. Torch destroys the logits on the way.

    Args:
        logits_CW: as `update_statistics` saw them, any float type.
        labels_C: counted from the first column.
        out_CW: any float type; may be `logits_CW` itself.
    """
    if triton:
        from megappo_kernels.gpu.rows import launch_gradient

        launch_gradient(logits_CW, labels_C, rows, scaling, out_CW)
        return out_CW
    exact_CW = logits_CW if logits_CW.dtype == rows.max_C.dtype else logits_CW.to(rows.max_C.dtype)
    slope_CW = None
    if scaling.softcap is not None:
        exact_CW.div_(scaling.softcap)
        # 1 - tanh^2 by r = e^(-2|x|), which does not cancel where tanh is near 1.
        r_CW = exact_CW.abs().mul_(-2).exp_()
        slope_CW = 4 * r_CW / (1 + r_CW).square_()
        exact_CW.tanh_().mul_(scaling.softcap)
    if not scaling.is_identity:
        exact_CW.mul_(scaling.column())
    shifted_CW = exact_CW.sub_(rows.max_C[:, None])
    log_sum_C = rows.sum_C.log()
    if rows.entropy_C is None:
        grad_CW = shifted_CW.sub_(log_sum_C[:, None]).exp_().mul_(-rows.logprob_C[:, None])
    else:
        # -p (g_l + g_H (z - M - U/S))
        prob_CW = (shifted_CW - log_sum_C[:, None]).exp_()
        shifted_CW.sub_((rows.weighted_C / rows.sum_C)[:, None]).mul_(rows.entropy_C[:, None])
        grad_CW = shifted_CW.add_(rows.logprob_C[:, None]).mul_(prob_CW).neg_()
    here_C = (labels_C >= 0) & (labels_C < logits_CW.shape[1])
    column_C1 = labels_C.clamp(0, logits_CW.shape[1] - 1)[:, None]
    grad_CW.scatter_add_(1, column_C1, torch.where(here_C, rows.logprob_C, 0.0)[:, None].to(grad_CW.dtype))
    if slope_CW is not None:
        grad_CW.mul_(slope_CW)
    if not scaling.is_identity:
        grad_CW.mul_(scaling.column())
    return out_CW if out_CW is grad_CW else out_CW.copy_(grad_CW)
