"""What a transformer's layer computes between its matrices: SwiGLU, and the rotation of queries and keys.

With Triton each is one kernel forward and one backward, and keeps nothing but its operands; elsewhere torch's
operations, which autograd differentiates.
Shape legend: T tokens, F features, H heads, D channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from megappo_kernels.backend import runs_triton


def swiglu(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """(..., 2F) -> (..., F): silu of the first half times the second, times the weights (...) where they are given.

    Of the type of `gate_up`, whatever the weights' type; float32 inside with Triton.
    Source: Shazeer 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202), equation 6.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"{gate_up.shape[-1]} columns are no gate and up side by side; give an even number of them")
    if weights is not None and weights.shape != gate_up.shape[:-1]:
        raise ValueError(f"weights are {tuple(weights.shape)}, must be one for each row, {tuple(gate_up.shape[:-1])}")
    if runs_triton(gate_up):
        found: Tensor = _SwiGLU.apply(gate_up, weights)
        return found
    gate, up = gate_up.chunk(2, dim=-1)
    product = silu(gate) * up
    return product if weights is None else (product * weights.unsqueeze(-1)).to(product.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None) -> Tensor:
        from megappo_kernels.gpu.layers import launch_swiglu

        gate_up_TG = gate_up.contiguous().view(-1, gate_up.shape[-1])
        weights_T = None if weights is None else weights.contiguous().view(-1)
        ctx.save_for_backward(gate_up_TG, weights_T)
        ctx.shapes = gate_up.shape, None if weights is None else weights.shape
        return launch_swiglu(gate_up_TG, weights_T).view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        from megappo_kernels.gpu.layers import launch_swiglu_gradient

        gate_up_TG, weights_T = ctx.saved_tensors
        shape, shape_of_weights = ctx.shapes
        grad_TF = grad.contiguous().view(-1, grad.shape[-1])
        of_gate_up, of_weights = launch_swiglu_gradient(grad_TF, gate_up_TG, weights_T)
        return of_gate_up.view(shape), None if of_weights is None else of_weights.view(shape_of_weights)


def rotate_pairs(x_THD: Tensor, cosine_T1D: Tensor, sine_T1D: Tensor) -> Tensor:
    """Turn each pair of channels i and i + D/2 by its token's angles, whose cosines and sines the second half repeats.

    Source: Su et al. 2021, "RoFormer" (arXiv:2104.09864), equation 34, with the pairs of GPT-NeoX.
    """
    if runs_triton(x_THD):
        found: Tensor = _Rotation.apply(x_THD, cosine_T1D, sine_T1D)
        return found
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cosine_T1D + torch.cat((-second, first), dim=-1) * sine_T1D


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cosine_T1D: Tensor, sine_T1D: Tensor) -> Tensor:
        angles = cosine_T1D.contiguous(), sine_T1D.contiguous()
        ctx.save_for_backward(*angles)
        return _turned(x_THD, *angles, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None, None]:
        return _turned(grad_THD, *ctx.saved_tensors, back=True), None, None


def _turned(x_THD: Tensor, cosine_T1D: Tensor, sine_T1D: Tensor, *, back: bool) -> Tensor:
    from megappo_kernels.gpu.layers import launch_rotation

    side_by_side = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
    return launch_rotation(side_by_side, cosine_T1D, sine_T1D, back=back)
