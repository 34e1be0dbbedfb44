"""Patches of Megatron: gathers of weights bucket by bucket, and a gradient norm with one read on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import megappo.megatron  # noqa: F401 - before megatron.core
from megappo.megatron.patches.all_devices import fix_gradient_norm
from megappo.megatron.patches.cpu import gather_one_by_one
from tests.support.workers.reads_worker import Copies, Reads


class Collectives(TorchDispatchMode):
    """Record the names of called collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("late", [True, False])
def test_no_gather_is_coalesced(late: bool, world_of_one: None) -> None:
    from megatron.core.distributed import param_and_grad_buffer

    gather_one_by_one()
    usual = dict(vars(param_and_grad_buffer))
    weights = [torch.randn(6), torch.randn(4)]
    group: Any = SimpleNamespace(
        ddp_config=SimpleNamespace(use_distributed_optimizer=True, overlap_param_gather=late),
        buckets=[SimpleNamespace(param_data=torch.zeros_like(x)) for x in weights],
        # In a dispatch mode gloo uses the ranks as the first dimension.
        cached_param_buffer_shard_list=[x.view(1, -1) for x in weights],
        intra_distributed_optimizer_instance_group=dist.group.WORLD,
        intra_distributed_optimizer_instance_size=1,
        intra_distributed_optimizer_instance_rank=0,
        param_gather_handle=None,
    )
    with Collectives() as called:
        param_and_grad_buffer._ParamAndGradBucketGroup.start_param_sync(group)
        if late:
            group.param_gather_handle.wait()
    assert called.names == ["_allgather_base_"] * 2
    assert (group.param_gather_handle is not None) == late
    for bucket, expected in zip(group.buckets, weights, strict=True):
        assert torch.equal(bucket.param_data, expected)
    assert vars(param_and_grad_buffer) == usual, "other collectives must not change"


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
