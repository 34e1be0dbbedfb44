"""The memory that weights pass through on their way into colocated servers on a CPU."""

from __future__ import annotations

from torch import Tensor

from megappo.engines.sglang.transport import buffer_handles, open_buffers, share_buffers, share_by_name
from megappo.reshard.slices import Receiver
from megappo.reshard.stream import Delivery
from megappo.runtime.objects import broadcast_object
from megappo.runtime.process import Runtime


class SyncBuffers:
    """Two buffers for each receiver, made once and used by every sync."""

    def __init__(self) -> None:
        self._buffers: dict[Receiver, list[Tensor]] = {}
        self._delivery: Delivery | None = None

    def of(self, delivery: Delivery, runtime: Runtime, placement: str, *, shared: bool) -> dict[Receiver, list[Tensor]]:
        """For those of this rank that servers and, where it is `shared`, all ranks can open; a collective then.

        None where payloads are broadcast, and on GPUs: a server answers when its copies are queued, and torch's
        allocator gives memory out again when the server has let go of it, so each payload gets its own, at most two.
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
        """Let go of them."""
        self._buffers, self._delivery = {}, None
