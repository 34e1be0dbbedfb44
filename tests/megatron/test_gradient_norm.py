"""The norm of all gradients equals the norm of Megatron and requires one read on the host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import megappo.megatron  # noqa: F401 - before megatron.core
from megappo.runtime.megatron_patches import fix_gradient_norm
from tests.support.workers.reads_worker import Copies, Reads


@pytest.mark.parametrize("count", [1, 40])
def test_norm_of_many_gradients_needs_one_read(count: int, world_of_one: None) -> None:
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
    from megatron.core.utils import local_multi_tensor_l2_norm

    fix_gradient_norm()
    g = torch.Generator().manual_seed(count)
    gradients = [torch.randn(1 + 37 * i % 11, 5, generator=g) for i in range(count)]
    with Reads() as scalars, Copies() as tensors:
        norm = get_grad_norm_fp32(gradients, grad_stats_parallel_group=dist.group.WORLD)
    assert scalars.count + tensors.count == 1, "the host must read only the sum over all ranks"
    exact = float(torch.cat([x.flatten() for x in gradients]).double().norm())
    assert abs(norm - exact) <= 1e-6 * exact
    (theirs,), _ = local_multi_tensor_l2_norm(0, None, [gradients], False)
    assert norm == pytest.approx(float(theirs), rel=1e-6)


def test_norm_without_gradients_is_zero(world_of_one: None) -> None:
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    fix_gradient_norm()
    assert get_grad_norm_fp32([], grad_stats_parallel_group=dist.group.WORLD) == 0
