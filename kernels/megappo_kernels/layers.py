"""Operations of a transformer layer between matrix products: SwiGLU, rotation of queries and keys, and RMSNorm.

With Triton, SwiGLU and the rotation use one kernel in forward and one in backward, and save only their operands.
Other devices use torch's operations. On a CPU, custom backward passes read and write memory less often than
autograd. Shape legend: T tokens, F features, H heads, D channels of a head.
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
    """Return silu of the first half times the second half: (..., 2F) -> (..., F). Optional weights (...) multiply
    the rows.

    The result has the dtype of `gate_up` for every dtype of the weights. Triton computes in float32. Source: Shazeer
    2020, "GLU Variants Improve Transformer" (arXiv:2002.05202), equation 6.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"{gate_up.shape[-1]} columns are no gate and up side by side; pass an even number of columns")
    if weights is not None and weights.shape != gate_up.shape[:-1]:
        raise ValueError(f"weights are {tuple(weights.shape)}, must be one for each row, {tuple(gate_up.shape[:-1])}")
    if runs_triton(gate_up):
        output: Tensor = _SwiGLU.apply(gate_up, weights)
        return output
    product: Tensor = _TorchSwiGLU.apply(gate_up)
    return product if weights is None else (product * weights.unsqueeze(-1)).to(product.dtype)


class _TorchSwiGLU(torch.autograd.Function):
    """SwiGLU by torch's operations, bitwise equal to autograd's SwiGLU. Gradients are written directly to the output
    buffer."""

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
        grad_gate_up = torch.empty_like(gate_up)
        (gate, up), (of_gate, of_up) = gate_up.chunk(2, dim=-1), grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad, opened, out=of_up)
        torch.ops.aten.silu_backward(grad * up, gate, grad_input=of_gate)
        return grad_gate_up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: ContextWith[tuple[torch.Size, torch.Size | None]], gate_up: Tensor, weights: Tensor | None
    ) -> Tensor:
        from megappo_kernels.gpu.layers import launch_swiglu

        gate_up_TG = gate_up.contiguous().view(-1, gate_up.shape[-1])
        weights_T = None if weights is None else weights.contiguous().view(-1)
        ctx.save_for_backward(gate_up_TG, weights_T)
        ctx.saved = gate_up.shape, None if weights is None else weights.shape
        return launch_swiglu(gate_up_TG, weights_T).view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: ContextWith[tuple[torch.Size, torch.Size | None]], grad: Tensor) -> tuple[Tensor, Tensor | None]:
        from megappo_kernels.gpu.layers import launch_swiglu_gradient

        gate_up_TG, weights_T = ctx.saved_tensors
        shape, shape_of_weights = ctx.saved
        grad_TF = grad.contiguous().view(-1, grad.shape[-1])
        of_gate_up, of_weights = launch_swiglu_gradient(grad_TF, gate_up_TG, weights_T)
        return of_gate_up.view(shape), None if of_weights is None or shape_of_weights is None else of_weights.view(
            shape_of_weights
        )


def rotate_pairs(x_THD: Tensor, cosine_T1D: Tensor, sine_T1D: Tensor) -> Tensor:
    """Rotate each pair of channels i and i + D/2 by the angles of its token. The second half of cosines and sines
    repeats the first half.

    The result has the dtype of `x`. If one operand is float32, the rotation is computed in float32, so that angles
    are not rounded to bfloat16.

    Source: Su et al. 2021, "RoFormer" (arXiv:2104.09864), equation 34, with the channel pairs of GPT-NeoX.
    """
    if runs_triton(x_THD):
        output: Tensor = _Rotation.apply(x_THD, cosine_T1D, sine_T1D)
        return output
    if x_THD.dtype != cosine_T1D.dtype:
        turned: Tensor = _TorchRotation.apply(x_THD, cosine_T1D, sine_T1D)
        return turned
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cosine_T1D + torch.cat((-second, first), dim=-1) * sine_T1D


class _TorchRotation(torch.autograd.Function):
    """Rotation in the dtype of the angles, with one rounding to the dtype of `x`."""

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
    output = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    (first, second), (of_first, of_second) = x_THD.chunk(2, dim=-1), output.chunk(2, dim=-1)
    cosine, sine = cosine_T1D.chunk(2, dim=-1)[0], sine_T1D.chunk(2, dim=-1)[0]
    of_first.copy_(torch.addcmul(first * cosine, second, -sine))
    of_second.copy_(torch.addcmul(second * cosine, first, sine))
    return output


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x_THD: Tensor, cosine_T1D: Tensor, sine_T1D: Tensor) -> Tensor:
        angles = cosine_T1D.contiguous(), sine_T1D.contiguous()
        ctx.save_for_backward(*angles)
        return _turned(x_THD, *angles, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_THD: Tensor) -> tuple[Tensor, None, None]:
        return _turned(grad_THD, *ctx.saved_tensors, inverse=True), None, None


def _turned(x_THD: Tensor, cosine_T1D: Tensor, sine_T1D: Tensor, *, inverse: bool) -> Tensor:
    from megappo_kernels.gpu.layers import launch_rotation

    side_by_side = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
    return launch_rotation(side_by_side, cosine_T1D, sine_T1D, inverse=inverse)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row of (..., F) by the root of (its mean square + eps), and multiply by the (F,) weight.

    The result has the dtype of `x`. As in torch, the norm is computed in float32 and rounded once. For bfloat16 on a
    CPU the function takes half of torch's time (benchmarks/results/2026-11-24-update-cpu.md). Source: Zhang and
    Sennrich 2019, "Root Mean Square Layer Normalization" (arXiv:1910.07467), equation 4.
    """
    if x.is_cuda or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return functional.rms_norm(x, weight.shape, weight, eps)
    output: Tensor = _RMSNorm.apply(x, weight, eps)
    return output


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that converts each operand to float32 once and then computes in place."""

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
