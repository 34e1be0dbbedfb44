"""Test sends of a pipeline stage whose next stage receives late; see test_pipeline_sends.py.

Usage (under torchrun, 2 ranks): sends_worker.py SIZE...
"""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist

import megappo.megatron  # noqa: F401 - before megatron.core
from megappo.megatron.patches.all_devices import PipelineSends


def content(size: int, number: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * number + size))


def send_and_forget(communicator: object, sends: PipelineSends, size: int) -> None:
    """Send as in the interleaved schedule: outputs are freed after their sends have started, and the last handle is
    dropped."""
    from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

    for number in range(3):
        output = content(size, number)
        _, handles = communicator.send_forward_recv_forward(  # type: ignore[attr-defined]
            output, recv_prev=False, tensor_shape=(size,), overlap_p2p_comm=True
        )
        deallocate_output_tensor(output, True)
        in_its_place = [torch.full((size,), float("nan")) for _ in range(4)]
        del handles, in_its_place
    gc.collect()
    dist.barrier()  # the other rank receives only after this barrier
    sends.finish()


def receive(communicator: object, size: int) -> None:
    dist.barrier()
    for number in range(3):
        received, handles = communicator.send_forward_recv_forward(  # type: ignore[attr-defined]
            None, recv_prev=True, tensor_shape=(size,), overlap_p2p_comm=True
        )
        handles["recv_prev"].wait()
        assert torch.equal(received.detach(), content(size, number)), f"{size} numbers, send {number}"


def main() -> None:
    from megatron.core import ModelParallelConfig
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    dist.init_process_group("gloo")
    config = ModelParallelConfig(pipeline_dtype=torch.float32, overlap_p2p_comm=True, batch_p2p_comm=False)
    communicator = P2PCommunicator(pp_group=dist.group.WORLD, config=config)
    sends = PipelineSends(communicator)
    for size in map(int, sys.argv[1:]):
        if dist.get_rank() == 0:
            send_and_forget(communicator, sends, size)
        else:
            receive(communicator, size)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
