"""Transfer payloads of weights from the ranks that feed a server into the server.

On the same machine only handles are sent. A payload is in shared memory (CPU) or is opened by CUDA IPC, with one
handle for each rank of the server. Ranks send their handles to the rank that manages the server. On other machines,
each rank that feeds a server broadcasts over a process group with the ranks of the server.
"""

from __future__ import annotations

import base64
import datetime
import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.engines.sglang.client import Endpoint, ServerFailure, call
from megappo.engines.sglang.weights.slice_loader import LOADER, SlicePlace, describe
from megappo.files.json_values import JSONValue
from megappo.network import store
from megappo.network.interfaces import reached_at
from megappo.reshard.slices import EngineShape
from megappo.reshard.stream import ReceiverPayload, Slot
from megappo.runtime.ranks.groups import leave_at_once
from megappo.runtime.ranks.nccl import errors_are_the_callers
from megappo.runtime.ranks.objects import receive_object, send_object
from megappo.runtime.waiting import wait_until

_POLL_SECONDS = 0.002


Loaded = Sequence[tuple[ReceiverPayload, Tensor]]
"""Payloads of one bucket, each with its memory, uint8 (bytes,)."""


class Transport(Protocol):
    """Transfer of payloads into one server."""

    def prepare(self, payloads: Loaded, others: Sequence[int]) -> Callable[[], None] | None:
        """Prepare the transfer of payloads. All ranks that feed the server call this method for every bucket with
        payloads.

        Returns a function for another thread, which raises ServerFailure. Returns None if another rank runs the
        transfer. `others` are the feeding ranks that do not manage the server.

        The memory is free after the function has returned. If another rank runs the transfer, the memory is free
        after the next bucket was prepared.
        """

    def close(self) -> None:
        """Release the resources for this server."""


class SharedTransport:
    """Transport to a server on the same machine, with handles of memory that the server opens."""

    def __init__(
        self, endpoint: Endpoint, shape: EngineShape, rank: int, timeout_seconds: float, numbers: Sequence[int]
    ) -> None:
        """Create the transport. `rank` is the rank of this process. `numbers` are the ranks of the server that open
        whole tensors of this rank."""
        self._endpoint, self._shape, self._rank, self._timeout = endpoint, shape, rank, timeout_seconds
        self._numbers = numbers

    def prepare(self, payloads: Loaded, others: Sequence[int]) -> Callable[[], None] | None:
        """See `Transport.prepare`. Each rank of the server opens a separate payload, or all ranks open the same
        payload."""
        handles = {number: handle for payload, flat in payloads for number, handle in self._handles(payload, flat)}
        if self._rank != self._endpoint.sender:
            send_object(handles, self._endpoint.sender)
            receive_object(self._endpoint.sender)  # sent after the server has loaded the previous bucket
            return None
        for rank in others:
            handles |= receive_object(rank)
        for rank in others:
            send_object(None, rank)
        load_format = LOADER if payloads[0][0].receiver.tp > 1 else "flattened_bucket"
        return partial(self._load, [handles[number] for number in sorted(handles)], load_format)

    def _handles(self, payload: ReceiverPayload, flat_bytes: Tensor) -> list[tuple[int, str]]:
        """Return handles for ranks of the server, each with the number of the rank."""
        flat = flat_bytes[: payload.n_bytes]
        if payload.receiver.tp > 1:
            return [(payload.receiver.tensor_rank, serialize([(describe(self._places(payload)), flat)]))]
        flattened = flat_payload(flat, payload.slots)
        # Create one handle for each opening. torch counts the openings of a handle, and frees the memory after the
        # last.
        return [(number, serialize(flattened)) for number in self._numbers]

    def _places(self, payload: ReceiverPayload) -> list[SlicePlace]:
        """Return the places of the byte ranges of a payload in the parameters of the engine."""
        places, slots, rank = [], iter(payload.slots), payload.receiver.tensor_rank
        for parameter in payload.parameters:
            own = [next(slots) for _ in parameter.hf]
            zeros = self._shape.padding(parameter, rank) * math.prod(own[0].shape[1:])
            part, parts = (0, 1) if parameter.expert is None else (parameter.expert, self._shape.arch.experts)
            name, dtype = parameter.engine_name, str(own[0].dtype).removeprefix("torch.")
            places.append(SlicePlace(name, part, parts, zeros, dtype, own[0].start, own[-1].stop))
        return places

    def _load(self, handles: list[str], load_format: str) -> None:
        # The cache is flushed once, at the end of the sync.
        body: dict[str, JSONValue] = {
            "serialized_named_tensors": handles,
            "load_format": load_format,
            "flush_cache": False,
        }
        call(self._endpoint, "/update_weights_from_tensor", body, timeout_seconds=self._timeout)

    def close(self) -> None:
        """Do nothing, because handles belong to the buffers, which exist longer than the transport."""


def flat_payload(flat_bytes: Tensor, slots: Sequence[Slot]) -> dict[str, Tensor | list[SimpleNamespace]]:
    """Return the content of SGLang's `flattened_bucket` format: uint8 (bytes,) and the place of each tensor in the
    bytes."""
    # Plain records replace SGLang's class, which has the same attributes. SGLang need not be imported.
    metadata = [
        SimpleNamespace(
            name=s.name, shape=s.shape, dtype=s.dtype, start_idx=s.start, end_idx=s.stop, numel=s.stop - s.start
        )
        for s in slots
    ]
    return {"flattened_tensor": flat_bytes, "metadata": metadata}


def serialize(payload: dict[str, Tensor | list[SimpleNamespace]] | list[tuple[str, Tensor]]) -> str:
    """Return the handles of the tensors of a payload as base64, for one opening in one process of the server."""
    out = io.BytesIO()
    _HandlePickler(out).dump(payload)
    return base64.b64encode(out.getvalue()).decode()


class _HandlePickler(ForkingPickler):
    """Pickler of CUDA handles that a server can open.

    The handle contains the UUID of the device, because the CUDA_VISIBLE_DEVICES of the server may differ. Servers
    look up the device by UUID (SGLang 0.5.23, srt/utils/patch_torch.py). The handle omits torch's event for
    synchronization, because weights are complete before their handles are sent. A server that replaces a killed
    server cannot open such events (`cudaErrorMapBufferObjectFailed`, on an H100 with torch 2.11).
    """

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a CUDA tensor as torch does, except for two arguments of `rebuild_cuda_tensor`. The UUID replaces
        the seventh argument `storage_device`. The last argument `event_sync_required` is false."""
        if not (isinstance(obj, Tensor) and obj.is_cuda):
            return NotImplemented
        rebuild, arguments = torch.multiprocessing.reductions.reduce_tensor(obj)
        uuid = str(torch.cuda.get_device_properties(arguments[6]).uuid)
        return rebuild, (*arguments[:6], uuid, *arguments[7:-1], False)


def share_by_name() -> None:
    """Name shared memory in the handles of this process. File descriptors, which are torch's default, need an
    authentication key that server and trainer do not share."""
    torch.multiprocessing.set_sharing_strategy("file_system")


def share_buffers(count: int, n_bytes: int) -> list[Tensor]:
    """Allocate byte buffers on the CPU that other processes of this machine can open by handle."""
    return [torch.empty(n_bytes, dtype=torch.uint8).share_memory_() for _ in range(count)]


def buffer_handles(buffers: Sequence[Tensor]) -> bytes:
    """Return pickled handles of buffers, for one `open_buffers` in one other process."""
    return bytes(ForkingPickler.dumps(list(buffers)))


def open_buffers(handles: bytes) -> list[Tensor]:
    """Map the buffers of another rank of the machine into this process."""
    found: list[Tensor] = ForkingPickler.loads(handles)
    return found


def address_towards(url: str) -> str:
    """Return the address of this machine for a server. Raises ServerFailure if there is no route."""
    parts = urlsplit(url)
    try:
        return store.address_towards(parts.hostname or "", parts.port or 80)
    except OSError as error:
        raise ServerFailure(f"there is no route to {url} of rollout.servers.urls ({error.strerror})") from None


class BroadcastTransport:
    """Transport over a process group of this rank (rank 0 of the group) and the ranks of the server. The first
    payload creates the group. Other ranks that feed the server have separate groups. The server processes one payload
    at a time."""

    def __init__(
        self, endpoint: Endpoint, tp: int, rank: int, address: str | None, timeout_seconds: float, backend: str
    ) -> None:
        """Create the transport. `rank` is the rank of this process. `address` is the address of this machine for the
        server. With None, the address is the source address of packets to the server."""
        self._endpoint, self._tp, self._address = endpoint, tp, address
        self._timeout, self._backend = timeout_seconds, backend
        self._group: dist.ProcessGroup | None = None
        self._name = f"megappo-{endpoint.index}-{endpoint.starts}-{rank}-{time.monotonic_ns()}"
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="megappo-sync")

    def prepare(self, payloads: Loaded, others: Sequence[int]) -> Callable[[], None]:
        """See `Transport.prepare`."""
        return partial(self._load_all, payloads)

    def _load_all(self, payloads: Loaded) -> None:
        for payload, flat_bytes in payloads:
            self._load(payload, flat_bytes)

    def _load(self, payload: ReceiverPayload, flat_bytes: Tensor) -> None:
        group = self._group or self._join()
        body: dict[str, JSONValue] = {
            "names": [s.name for s in payload.slots],
            "dtypes": [str(s.dtype).removeprefix("torch.") for s in payload.slots],
            "shapes": [list(s.shape) for s in payload.slots],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        answer = self._post("/update_weights_from_distributed", body)
        work = group.broadcast(flat_bytes[: payload.n_bytes], 0)

        def is_taken() -> bool:
            if answer.done():
                answer.result()  # raises if the server rejected the request, since the group would wait forever
            return bool(work.is_completed())

        if not wait_until(is_taken, self._timeout, every_seconds=_POLL_SECONDS):
            raise ServerFailure(f"{self._endpoint.name} did not receive a bucket within {self._timeout:g} seconds")
        try:
            work.wait()
        except RuntimeError as error:  # torch raises this error if a peer of the group has ended
            raise ServerFailure(f"the broadcast to {self._endpoint.name} failed ({error})") from None
        answer.result()

    def _post(self, path: str, body: Mapping[str, JSONValue]) -> Future[dict[str, JSONValue]]:
        return self._pool.submit(call, self._endpoint, path, body, timeout_seconds=self._timeout)

    def _join(self) -> dist.ProcessGroup:
        """Create the group with the ranks of the server, with a separate store. The store of torchrun belongs to the
        trainers."""
        world, timeout = 1 + self._tp, datetime.timedelta(seconds=self._timeout)
        address = self._address or address_towards(self._endpoint.url)
        try:
            meeting = store.listening_store(address, 0, world, timeout)
        except (RuntimeError, OSError) as error:
            raise ServerFailure(
                f"no broadcast group can be made at rollout.servers.sync_address {address} ({error})"
            ) from None
        answer = self._post(
            "/init_weights_update_group",
            {
                "master_address": address,
                "master_port": meeting.port,
                "rank_offset": 1,
                "world_size": world,
                "group_name": self._name,
                "backend": self._backend,
            },
        )
        try:
            with reached_at(address), errors_are_the_callers():
                # `new_group` accepts only ranks of the trainer's world, and the ranks of a server are not in this
                # world.
                group, _ = dist.distributed_c10d._new_process_group_helper(
                    world,
                    0,
                    [],
                    dist.Backend(self._backend),
                    dist.PrefixStore(self._name, meeting),
                    group_name=cast(Any, self._name),
                    timeout=timeout,
                )
        except RuntimeError as error:
            raise ServerFailure(f"{self._endpoint.name} did not join the broadcast group ({error})") from None
        answer.result()
        assert isinstance(group, dist.ProcessGroup)
        # The helper does not register the ranks of a group as `new_group` does. `destroy_process_group` requires
        # them.
        dist.distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
        self._store, self._group = meeting, group
        return group

    def close(self) -> None:
        """Leave the group, even if the server has ended."""
        group, self._group = self._group, None
        if group is not None:
            leave_at_once(group)
        self._pool.shutdown(wait=False, cancel_futures=True)
