"""Operations of a transformer layer between its matrices: SwiGLU, rotation of queries and keys, and RMSNorm.

With Triton the first two are one kernel forward and one backward, and keep only their operands; elsewhere they are
torch's operations. On a CPU, backward is written out where autograd would pass over memory more often. Shape legend: T
tokens, F features, H heads, D channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.functional import silu

from megappo_kernels.autograd import Context, ContextWith
from megappo_kernels.backend import runs_triton


def swiglu(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """(..., 2F) -> (..., F): silu of the first half times the second, times the weights (...) where they are given.

    The result has the type of `gate_up`, whatever the weights' type; Triton computes in float32. Source: Shazeer 2020,
    "GLU Variants Improve Transformer" (arXiv:2002.05202), equation 6.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"{gate_up.shape[-1]} columns are no gate and up side by side; give an even number of them")
    if weights is not None and weights.shape != gate_up.shape[:-1]:
        raise ValueError(f"weights are {tuple(weights.shape)}, must be one for each row, {tuple(gate_up.shape[:-1])}")
    if runs_triton(gate_up):
        found: Tensor = _SwiGLU.apply(gate_up, weights)
        return found
    product: Tensor = _TorchSwiGLU.apply(gate_up)
    return product if weights is None else (product * weights.unsqueeze(-1)).to(product.dtype)


class _TorchSwiGLU(torch.autograd.Function):
    """SwiGLU by torch's operations, equal to autograd's to the last bit, with gradients written directly to their
    places."""

    @staticmethod
    def forward(ctx: Context, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        opened = silu(gate)
        ctx.save_for_backward(gate_up, opened)
        return opened * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        gate_up, opened = ctx.saved_tensors
        found = torch.empty_like(gate_up)
        (gate, up), (of_gate, of_up) = gate_up.chunk(2, dim=-1), found.chunk(2, dim=-1)
        torch.mul(grad, opened, out=of_up)
        torch.ops.aten.silu_backward(grad * up, gate, grad_input=of_gate)
        return found


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: ContextWith[tuple[torch.Size, torch.Size | None]], gate_up: Tensor, weights: Tensor | None
    ) -> Tensor:
        from megappo_kernels.gpu.layers import launch_swiglu

        gate_up_TG = gate_up.contiguous().view(-1, gate_up.shape[-1])
        weights_T = None if weights is None else weights.contiguous().view(-1)
        ctx.save_for_backward(gate_up_TG, weights_T)
        ctx.kept = gate_up.shape, None if weights is None else weights.shape
        return launch_swiglu(gate_up_TG, weights_T).view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: ContextWith[tuple[torch.Size, torch.Size | None]], grad: Tensor) -> tuple[Tensor, Tensor | None]:
        from megappo_kernels.gpu.layers import launch_swiglu_gradient

        gate_up_TG, weights_T = ctx.saved_tensors
        shape, shape_of_weights = ctx.kept
        grad_TF = grad.contiguous().view(-1, grad.shape[-1])
        of_gate_up, of_weights = launch_swiglu_gradient(grad_TF, gate_up_TG, weights_T)
        return of_gate_up.view(shape), None if of_weights is None or shape_of_weights is None else of_weights.view(
            shape_of_weights
        )


def rotate_pairs(x_THD: Tensor, cosine_T1D: Tensor, sine_T1D: Tensor) -> Tensor:
    """Rotate each pair of channels i and i + D/2 by its token's angles. The second half of cosines and sines repeats
    the first.

    The result has the type of `x`; it is computed in float32 where either is float32, so that angles need not be
    rounded to bfloat16.

    Source: Su et al. 2021, "RoFormer" (arXiv:2104.09864), equation 34, with the pairs of GPT-NeoX.
    """
    if runs_triton(x_THD):
        found: Tensor = _Rotation.apply(x_THD, cosine_T1D, sine_T1D)
        return found
    if x_THD.dtype != cosine_T1D.dtype:
        turned: Tensor = _TorchRotation.apply(x_THD, cosine_T1D, sine_T1D)
        return turned
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cosine_T1D + torch.cat((-second, first), dim=-1) * sine_T1D


class _TorchRotation(torch.autograd.Function):
    """Rotation computed in the type of the angles and rounded once, to the type of `x`."""

    @staticmethod
    def forward(ctx: Context, x_THD: Tensor, cosine_T1D: Tensor, sine_T1D: Tensor) -> Tensor:
        ctx.save_for_backward(cosine_T1D, sine_T1D)
        return _turned_by_torch(x_THD, cosine_T1D, sine_T1D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_THD: Tensor) -> tuple[Tensor, None, None]:
        cosine_T1D, sine_T1D = ctx.saved_tensors
        return _turned_by_torch(grad_THD, cosine_T1D, -sine_T1D), None, None


def _turned_by_torch(x_THD: Tensor, cosine_T1D: Tensor, sine_T1D: Tensor) -> Tensor:
    found = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    (first, second), (of_first, of_second) = x_THD.chunk(2, dim=-1), found.chunk(2, dim=-1)
    cosine, sine = cosine_T1D.chunk(2, dim=-1)[0], sine_T1D.chunk(2, dim=-1)[0]
    of_first.copy_(torch.addcmul(first * cosine, second, -sine))
    of_second.copy_(torch.addcmul(second * cosine, first, sine))
    return found


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x_THD: Tensor, cosine_T1D: Tensor, sine_T1D: Tensor) -> Tensor:
        angles = cosine_T1D.contiguous(), sine_T1D.contiguous()
        ctx.save_for_backward(*angles)
        return _turned(x_THD, *angles, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_THD: Tensor) -> tuple[Tensor, None, None]:
        return _turned(grad_THD, *ctx.saved_tensors, back=True), None, None


def _turned(x_THD: Tensor, cosine_T1D: Tensor, sine_T1D: Tensor, *, back: bool) -> Tensor:
    from megappo_kernels.gpu.layers import launch_rotation

    side_by_side = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
    return launch_rotation(side_by_side, cosine_T1D, sine_T1D, back=back)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(..., F): each row divided by the root of (its mean square + eps), times the (F,) weight; of the type of `x`.

    As in torch, it is computed in float32 and rounded once at the end; in bfloat16 on a CPU in half of torch's time
    (benchmarks/results/2026-11-24-update-cpu.md). Source: Zhang and Sennrich 2019, "Root Mean Square Layer
    Normalization" (arXiv:1910.07467), equation 4.
    """
    if x.is_cuda or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return functional.rms_norm(x, weight.shape, weight, eps)
    found: Tensor = _RMSNorm.apply(x, weight, eps)
    return found


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that converts each operand to float32 once and then works in place."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        factor = size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, factor)
        return wide.mul_(factor).mul_(weight.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factor = ctx.saved_tensors
        wide, wide_grad, wide_weight = x.float(), grad.float(), weight.float()
        products_TF, factor_T = (wide_grad * wide).reshape(-1, x.shape[-1]), factor.reshape(-1)
        of_weight = products_TF.t().mv(factor_T)
        # factor * (grad weight - x factor^2 * mean of (grad weight x) over the row)
        mean = products_TF.mv(wide_weight).mul_(factor_T.square()).div_(-x.shape[-1]).view(factor.shape)
        of_x = wide_grad.mul_(wide_weight).addcmul_(wide, mean).mul_(factor)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None
