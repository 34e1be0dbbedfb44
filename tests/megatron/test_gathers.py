"""On gloo the weights of the distributed optimizer are gathered bucket by bucket with one common wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import megappo.megatron  # noqa: F401 - before megatron.core
from megappo.runtime.megatron_cpu import gather_one_by_one


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
