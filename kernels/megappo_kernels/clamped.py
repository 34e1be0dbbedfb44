"""Activation of the experts of gpt-oss: SwiGLU with clamped inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megappo_kernels.autograd import ContextWith


@dataclass(frozen=True)
class ClampedSwiGLU:
    """Activation (up + 1) gate sigmoid(alpha gate), with the gate clamped to at most `limit` and up to [-limit,
    limit].

    Source: openai/gpt-oss, gpt_oss/torch/model.py, `swiglu`.
    """

    alpha: float
    limit: float

    def __call__(self, gate_up: Tensor, weights: Tensor) -> Tensor:
        """Return the activation of (R, 2F) gates and ups side by side, times the (R,) weights: (R, F) in the dtype
        of `gate_up`.

        The result is rounded once. Backward saves only the inputs. Clamped values have no gradient. Raises
        ValueError for an odd number of columns.
        """
        if gate_up.shape[-1] % 2:
            raise ValueError(f"{gate_up.shape[-1]} columns are no gate and up side by side; pass an even number")
        output: Tensor = _Clamped.apply(gate_up, weights, self.alpha, self.limit)
        return output


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: ContextWith[tuple[float, float]], gate_up: Tensor, weights: Tensor, alpha: float, limit: float
    ) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.saved = alpha, limit
        gate, up = gate_up.to(_wide(gate_up.dtype)).chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        product = (up.clamp(-limit, limit) + 1).mul_(gate).mul_(torch.sigmoid(alpha * gate))
        return product.mul_(weights.unsqueeze(-1)).to(gate_up.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: ContextWith[tuple[float, float]], grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weights = ctx.saved_tensors
        alpha, limit = ctx.saved
        wide_grad, wide_gate_up = (x.to(_wide(gate_up.dtype)) for x in (grad, gate_up))
        gate, up = wide_gate_up.chunk(2, dim=-1)
        below, within = gate < limit, up.abs() < limit
        gate, above = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
        share = torch.sigmoid(alpha * gate)
        opened = gate * share
        of_weights = (wide_grad * above * opened).sum(-1)
        of_product = wide_grad * weights.unsqueeze(-1)
        of_gate_up = torch.empty_like(gate_up)
        of_gate, of_up = of_gate_up.chunk(2, dim=-1)
        of_up.copy_(of_product * opened * within)
        of_gate.copy_(of_product * above * (share + alpha * opened * (1 - share)) * below)
        return of_gate_up, of_weights.to(weights.dtype), None, None
