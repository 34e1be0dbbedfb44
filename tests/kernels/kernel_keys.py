"""Count how often Triton would compile each kernel for packs of many sizes.

`python -m tests.kernels.kernel_keys` runs in a process without Triton's interpreter and prints the specialisation keys
of each kernel as JSON. No kernel is compiled or run.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from megappo_kernels.backend import use_backend
from megappo_kernels.blocks import CHUNK_BYTES
from megappo_kernels.gae import gae
from megappo_kernels.gpu import gae as gpu_gae
from megappo_kernels.gpu import head, layers, objectives, rows, whiten
from megappo_kernels.layers import rotate_pairs, swiglu
from megappo_kernels.lm_head import linear_logprob
from megappo_kernels.logits import logits_logprob
from megappo_kernels.losses import PolicyInputs
from megappo_kernels.ppo_head import ppo_head_loss
from megappo_kernels.whiten import masked_whiten_stats

SIZES = (1, 2, 3, 4, 7, 15, 16, 17, 32, 33, 50, 64, 100, 127, 128, 129, 200, 256, 257)
FEATURES, VOCABULARY = 32, 1792
KERNELS: dict[Any, tuple[str, ...]] = {
    rows: ("statistics_kernel", "gradient_kernel"), head: ("fused_kernel",), objectives: ("objective_kernel",),
    gpu_gae: ("gae_kernel",), whiten: ("whiten_kernel",),
    layers: ("swiglu_kernel", "swiglu_gradient_kernel", "rotation_kernel"),
}  # fmt: skip


class CountingKernel:
    """A stand-in for a kernel that records the keys of the binaries in Triton's cache."""

    def __init__(self, kernel: Any) -> None:
        self.keys: set[str] = set()
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._bind = create_function_from_signature(kernel.signature, kernel.params, backend)

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(self, *arguments: Any, **options: Any) -> None:
        _, specialization, rest = self._bind(*arguments, **options)
        self.keys.add(f"{specialization} {rest}")


def one_pack(size: int, dtype: torch.dtype) -> None:
    """Launch all kernels of a step for a pack of `size` tokens."""
    hidden = torch.randn(size, FEATURES, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, FEATURES, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (size,))
    torch.autograd.backward(linear_logprob(hidden, weight, labels), [torch.ones(size), torch.ones(size)])
    logits_logprob(hidden @ weight.T, labels)[0].sum().backward()
    old, advantages, weights = torch.randn(3, size).unbind(0)
    inputs = PolicyInputs(old, advantages, weights, mask=torch.ones(size, dtype=torch.bool))
    ppo_head_loss(hidden, weight, labels, inputs)
    values, mask = torch.randn(2, size), torch.rand(2, size) < 0.5
    gae(values, values, mask, gamma=0.99, lam=0.95)
    ends = torch.tensor([0, size // 2, size])
    gae(values[0], values[0], mask[0], gamma=0.99, lam=0.95, cu_seqlens=ends)
    masked_whiten_stats(values[1], mask[1])
    layers_of(size, dtype)


def layers_of(size: int, dtype: torch.dtype) -> None:
    """Run an MLP, experts, contiguous queries, and keys that are a view of the QKV output."""
    gate_up = torch.randn(size, 2 * FEATURES, dtype=dtype, requires_grad=True)
    for weights in (None, torch.rand(size)):
        swiglu(gate_up, weights).sum().backward()
    qkv, angles = torch.randn(size, 2, 6, 16, dtype=dtype, requires_grad=True), torch.randn(2, size, 1, 16)
    for x in (qkv[:, :, :4].reshape(size, 8, 16), qkv[:, :, 4]):
        rotate_pairs(x, *angles).backward(torch.ones(size, x.shape[1], 16, dtype=dtype))


def main() -> None:
    """Count the keys over all sizes in float32 and bfloat16."""
    CHUNK_BYTES["cpu"] = 6 * VOCABULARY * 128  # chunks of 128 rows and a remainder
    counted = {name: CountingKernel(getattr(module, name)) for module, names in KERNELS.items() for name in names}
    for module, names in KERNELS.items():
        for name in names:
            setattr(module, name, counted[name])
    with use_backend("triton"):
        for size in SIZES:
            for dtype in (torch.float32, torch.bfloat16):
                one_pack(size, dtype)
    print(json.dumps({name: sorted(kernel.keys) for name, kernel in counted.items()}))


if __name__ == "__main__":
    main()
