"""Triton kernels for SwiGLU and for the rotation of queries and keys. Each kernel reads its operands once and
computes in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4
"""Columns of a row that SwiGLU processes at a time, and warps per program."""
HEADS, ROTATION_WARPS = 8, 4
"""Heads per program of the rotation, and warps per program."""


@triton.jit
def swiglu_kernel(gate_up, weights, out, features, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Compute silu(gate) up times the row's weight, for a row of `gate_up` (rows, 2 features)."""
    row = tl.program_id(0).to(tl.int64)
    gate_up += row * 2 * features
    out += row * features
    weight = tl.load(weights + row).to(tl.float32) if WEIGHTED else 1.0
    for start in range(0, features, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < features
        gate = tl.load(gate_up + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + features + columns, mask=inside, other=0.0).to(tl.float32)
        product = gate * tl.sigmoid(gate) * up * weight
        tl.store(out + columns, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_gradient_kernel(
    grad, gate_up, weights, grad_gate_up, grad_weights, features, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the gradient of a row of `gate_up`, and of its weight."""
    row = tl.program_id(0).to(tl.int64)
    grad += row * features
    gate_up += row * 2 * features
    grad_gate_up += row * 2 * features
    weight = tl.load(weights + row).to(tl.float32) if WEIGHTED else 1.0
    of_weight = tl.zeros([BLOCK], tl.float32)
    for start in range(0, features, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < features
        upstream = tl.load(grad + columns, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_up + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + features + columns, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        of_weight += upstream * gate * share * up
        upstream *= weight
        of_gate = upstream * up * share * (1.0 + gate * (1.0 - share))
        of_up = upstream * gate * share
        tl.store(grad_gate_up + columns, of_gate.to(grad_gate_up.dtype.element_ty), mask=inside)
        tl.store(grad_gate_up + features + columns, of_up.to(grad_gate_up.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(grad_weights + row, tl.sum(of_weight, 0).to(grad_weights.dtype.element_ty))


@triton.jit
def rotation_kernel(
    x, cosine, sine, out, heads, width, token_stride, head_stride, INVERSE: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of a token of `x`: channels i and i + width / 2 by the angles of the token. BACK inverts the
    rotation."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, HALF)[None, :]
    half = width // 2
    inside = (head < heads) & (channel < half)
    cos = tl.load(cosine + token * width + channel, mask=channel < half, other=0.0).to(tl.float32)
    sin = tl.load(sine + token * width + channel, mask=channel < half, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    x += token * token_stride + head * head_stride + channel
    out += (token * heads + head) * width + channel
    first = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(out + half, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)


def launch_swiglu(gate_up_TG: Tensor, weights_T: Tensor | None) -> Tensor:
    """Return SwiGLU of contiguous operands: (T, 2F) -> (T, F) of the same dtype."""
    rows, width = gate_up_TG.shape
    out_TF = gate_up_TG.new_empty(rows, width // 2)
    if out_TF.numel():
        swiglu_kernel[(rows,)](
            gate_up_TG, weights_T, out_TF, width // 2, WEIGHTED=weights_T is not None, BLOCK=BLOCK, num_warps=WARPS
        )
    return out_TF


def launch_swiglu_gradient(
    grad_TF: Tensor, gate_up_TG: Tensor, weights_T: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of both operands of `launch_swiglu`, in their dtypes. Operands must be contiguous."""
    rows, width = gate_up_TG.shape
    grad_gate_up_TG = torch.empty_like(gate_up_TG)
    grad_weights_T = None if weights_T is None else torch.zeros_like(weights_T)
    if grad_TF.numel():
        swiglu_gradient_kernel[(rows,)](
            grad_TF, gate_up_TG, weights_T, grad_gate_up_TG, grad_weights_T, width // 2,
            WEIGHTED=weights_T is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return grad_gate_up_TG, grad_weights_T


def launch_rotation(x_THD: Tensor, cosine_TD: Tensor, sine_TD: Tensor, *, inverse: bool) -> Tensor:
    """Rotate (T, H, D) with contiguous channels by the angles of contiguous (T, D) cosines and sines."""
    tokens, heads, width = x_THD.shape
    out_THD = x_THD.new_empty(x_THD.shape)
    if out_THD.numel():
        rotation_kernel[(tokens, triton.cdiv(heads, HEADS))](
            x_THD, cosine_TD, sine_TD, out_THD, heads, width, x_THD.stride(0), x_THD.stride(1),
            INVERSE=inverse, HEADS=HEADS, HALF=triton.next_power_of_2(width // 2), num_warps=ROTATION_WARPS,
        )  # fmt: skip
    return out_THD
