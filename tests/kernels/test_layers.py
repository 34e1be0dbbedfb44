"""SwiGLU, rotary positions and RMSNorm compared with float64, with Triton and with torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megappo_kernels.backend import use_backend
from megappo_kernels.layers import rms_norm, rotate_pairs, swiglu
from tests.support.kernels import relative

BACKENDS = ("torch", "triton")
# Triton's interpreter truncates float32 to bfloat16, but hardware rounds, so the error doubles.
GATE = {torch.float32: 5e-7, torch.bfloat16: 2.0**-7}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_swiglu(gate_up: Tensor, weights: Tensor | None) -> Tensor:
    """Compute SwiGLU with the exponential function."""
    half = gate_up.shape[-1] // 2
    product = gate_up[..., :half] / (1 + torch.exp(-gate_up[..., :half])) * gate_up[..., half:]
    return product if weights is None else product * weights[..., None]


def exact_rotation(x: Tensor, angles_TP: Tensor) -> Tensor:
    """Compute the rotation as a product of complex numbers."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles_TP), angles_TP)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(5, 1, 48), (3, 2 * 1100), (2, 2 * 2048)])
def test_swiglu(backend: str, dtype: torch.dtype, weighted: bool, shape: tuple[int, ...]) -> None:
    """The shapes have partial blocks, one block and several blocks of columns. Gates are small and large."""
    gate_up = (drawn(1, *shape) * drawn(2, *shape).exp()).to(dtype).requires_grad_()
    weights = drawn(3, *shape[:-1]).sigmoid().requires_grad_() if weighted else None
    up = drawn(4, *shape[:-1], shape[-1] // 2).to(dtype)
    with use_backend(backend):  # type: ignore[arg-type]
        out = swiglu(gate_up, weights)
    out.backward(up)
    tensors = [gate_up] if weights is None else [gate_up, weights]
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    true = exact_swiglu(leaves[0], leaves[1] if weighted else None)
    true.backward(up.double())
    assert out.dtype == dtype and out.shape == true.shape
    assert relative(out.detach(), true.detach()) <= GATE[dtype]
    for mine, leaf in zip(tensors, leaves, strict=True):
        assert mine.grad is not None and leaf.grad is not None and mine.grad.dtype == mine.dtype
        assert relative(mine.grad, leaf.grad) <= GATE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_swiglu_is_bit_identical(dtype: torch.dtype) -> None:
    """The result equals the separate operations with autograd."""
    gate_up = (drawn(1, 37, 1, 96) * drawn(2, 37, 1, 96).exp()).to(dtype).requires_grad_()
    grad = drawn(4, 37, 1, 48).to(dtype)
    with use_backend("torch"):
        out = swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    plain = torch.nn.functional.silu(gate) * up
    assert torch.equal(out, plain)
    assert torch.equal(*(torch.autograd.grad(x, gate_up, grad)[0] for x in (out, plain)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(37, 1, 576), (5, 9, 64), (2, 1, 7)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The rows are a view of wider rows, like queries. The test includes small rows, large rows and rows of zeros."""
    wide = drawn(1, *shape[:-1], 3, shape[-1]) * drawn(2, *shape[:-1], 1, 1).mul(3).exp()
    wide[0] = 0
    wide = wide.to(dtype).requires_grad_()
    weight = drawn(3, shape[-1]).to(dtype).requires_grad_()
    grad, eps = drawn(4, *shape).to(dtype), 1e-5
    out = rms_norm(wide[..., 1, :], weight, eps)
    out.backward(grad)
    leaves = [x.detach().double().requires_grad_() for x in (wide, weight)]
    rows = leaves[0][..., 1, :]
    true = rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt() * leaves[1]
    true.backward(grad.double())
    assert out.dtype == dtype and out.shape == true.shape
    gate = {torch.float32: 5e-7, torch.bfloat16: 2.0**-8}[dtype]
    assert relative(out.detach(), true.detach()) <= gate
    for mine, leaf in zip((wide, weight), leaves, strict=True):
        assert mine.grad is not None and leaf.grad is not None and mine.grad.dtype == mine.dtype
        assert relative(mine.grad, leaf.grad) <= gate


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width"), [(2, 16), (11, 24)])
def test_rotation(backend: str, dtype: torch.dtype, heads: int, width: int) -> None:
    """The heads are a view of wider rows, like keys. Some widths are no power of two."""
    tokens = 7
    wide = drawn(5, tokens, heads, 3, width).to(dtype).requires_grad_()
    angles_TP = drawn(6, tokens, width // 2).double() * 10
    full = torch.cat([angles_TP, angles_TP], -1)[:, None]
    cosine, sine = full.cos().to(dtype), full.sin().to(dtype)
    up = drawn(7, heads, tokens, width).to(dtype).transpose(0, 1)
    with use_backend(backend):  # type: ignore[arg-type]
        out = rotate_pairs(wide[:, :, 1], cosine, sine)
    out.backward(up)
    leaf = wide.detach().double().requires_grad_()
    true = exact_rotation(leaf[:, :, 1], angles_TP)
    true.backward(up.double())
    assert wide.grad is not None and leaf.grad is not None and out.dtype == dtype
    assert relative(out.detach(), true.detach()) <= GATE[dtype]
    assert relative(wide.grad, leaf.grad) <= GATE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_angles_are_not_rounded_to_the_input_dtype(backend: str) -> None:
    """The inputs are bfloat16 at positions near 32,768. Forward and backward have the error of one rounding to
    bfloat16. In Triton's interpreter they have the error of one truncation."""
    cut = 2.03 if backend == "triton" and not torch.cuda.is_available() else 1.02
    positions = torch.arange(32_000, 32_768, 8)
    angles_TP = positions.double()[:, None] * 1e6 ** -(torch.arange(32).double() / 32)
    full = torch.cat([angles_TP, angles_TP], -1)[:, None]
    x = drawn(12, len(positions), 3, 64).bfloat16().requires_grad_()
    up = drawn(13, len(positions), 3, 64).bfloat16()
    with use_backend(backend):  # type: ignore[arg-type]
        out = rotate_pairs(x, full.cos().float(), full.sin().float())
    out.backward(up)
    leaf = x.detach().double().requires_grad_()
    true = exact_rotation(leaf, angles_TP)
    true.backward(up.double())
    assert x.grad is not None and leaf.grad is not None and out.dtype == x.grad.dtype == torch.bfloat16
    for mine, exact in ((out.detach(), true.detach()), (x.grad, leaf.grad)):
        assert relative(mine, exact) <= cut * relative(exact.bfloat16(), exact)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_without_rows(backend: str) -> None:
    """An expert can have no tokens."""
    rows, weights, heads = torch.empty(0, 8).requires_grad_(), torch.empty(0).requires_grad_(), torch.empty(0, 2, 8)
    with use_backend(backend):  # type: ignore[arg-type]
        out = swiglu(rows, weights)
        turned = rotate_pairs(heads, torch.empty(0, 1, 8), torch.empty(0, 1, 8))
    out.sum().backward()
    assert out.shape == (0, 4) and turned.shape == heads.shape
    assert rows.grad is not None and rows.grad.shape == rows.shape


def test_kernels_save_only_their_operands() -> None:
    """The operations of torch also save silu(gate)."""
    saved: set[int] = set()

    def record(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    gate_up, x, angles = drawn(8, 3, 32).requires_grad_(), drawn(9, 3, 2, 8).requires_grad_(), drawn(10, 2, 3, 1, 8)
    with use_backend("triton"), torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        swiglu(gate_up)
        rotate_pairs(x, *angles)
    assert saved == {t.untyped_storage().data_ptr() for t in (gate_up, angles)}


def test_float64_uses_torch() -> None:
    gate_up = drawn(11, 2, 8).double()
    with use_backend("triton"):
        assert relative(swiglu(gate_up), exact_swiglu(gate_up, None)) < 1e-15


def test_bad_shapes_are_rejected() -> None:
    with pytest.raises(ValueError, match="7 columns are no gate and up"):
        swiglu(torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"weights are \(3,\), must be one for each row, \(2,\)"):
        swiglu(torch.zeros(2, 8), torch.zeros(3))


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA")
def test_torchs_norm_is_one_kernel_on_cuda(torchs_factories: None) -> None:
    """Torch has one kernel for the norm of bfloat16 queries, so megappo has no such kernel. The test reads the dispatch
    table of torch."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm_backward", "CUDA")
    with FakeTensorMode(), _Operators() as operators:
        x, weight = torch.empty(6, 2, 8, device="cuda:0", dtype=torch.bfloat16), torch.ones(8, device="cuda:0")
        operators.names.clear()
        torch.nn.functional.rms_norm(x, (8,), weight.to(torch.bfloat16), 1e-6)
    assert [n for n in operators.names if n not in ("device", "detach", "_to_copy")] == ["_fused_rms_norm"]
