"""Shared memory for sending weights to colocated servers on CPUs."""

from __future__ import annotations

from torch import Tensor

from megappo.engines.sglang.weights.transport import buffer_handles, open_buffers, share_buffers, share_by_name
from megappo.reshard.slices import Receiver
from megappo.reshard.stream import Delivery
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import broadcast_object


class SyncBuffers:
    """Two buffers for each receiver, allocated once and reused by every sync."""

    def __init__(self) -> None:
        self._buffers: dict[Receiver, list[Tensor]] = {}
        self._delivery: Delivery | None = None

    def of(self, delivery: Delivery, runtime: Runtime, placement: str, *, shared: bool) -> dict[Receiver, list[Tensor]]:
        """Return the buffers of the receivers of this rank. Servers can open these buffers. With `shared`, all ranks
        open the same buffers, and the call is a collective.

        Returns no buffers if payloads are broadcast or if the run uses GPUs. On GPUs, SGLang answers before its
        queued copies are complete, so a reused buffer could be overwritten. The allocator of torch reuses memory only
        after the server has released the memory, and at most two payloads exist at a time.
        """
        if runtime.on_cuda or placement != "colocated" or not delivery.buckets:
            return {}
        if self._delivery is not delivery:
            share_by_name()
            rank = runtime.rank
            own = [r for r in delivery.receivers if r.rank == rank]
            made = [buffer for r in own for buffer in share_buffers(2, delivery.largest_bytes(r.part))]
            if shared:
                handles = broadcast_object(
                    [buffer_handles(made) for _ in range(runtime.world_size - 1)] if made else []
                )
                own, made = list(delivery.receivers), made or open_buffers(handles[rank - 1])
            self._buffers = {receiver: made[2 * n : 2 * n + 2] for n, receiver in enumerate(own)}
            self._delivery = delivery
        return self._buffers

    def free(self) -> None:
        """Release the buffers."""
        self._buffers, self._delivery = {}, None
