"""Brings a payload of weights from the ranks that feed a server into the server.

On the same machine only handles travel: a payload lies in shared memory (CPU) or is opened by CUDA IPC, one for each
rank of the server; the ranks that made handles send them to the one that looks after the server. Elsewhere each rank
that feeds a server has a process group with the server's ranks, over which it broadcasts.
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
from megappo.observe.json_values import JSONValue
from megappo.reshard.slices import EngineShape
from megappo.reshard.stream import ReceiverPayload, Slot
from megappo.runtime import store
from megappo.runtime.groups import leave_at_once
from megappo.runtime.interfaces import reached_at
from megappo.runtime.nccl import errors_are_the_callers
from megappo.runtime.objects import receive_object, send_object
from megappo.runtime.sglang_slices import LOADER, SlicePlace, describe
from megappo.runtime.waiting import wait_until

_POLL_SECONDS = 0.002


Loaded = Sequence[tuple[ReceiverPayload, Tensor]]
"""Payloads of one bucket, each with its memory, uint8 (bytes,)."""


class Transport(Protocol):
    """Way of payloads into one server."""

    def prepare(self, payloads: Loaded, others: Sequence[int]) -> Callable[[], None] | None:
        """Prepare the transfer of payloads. Returns a function to be run in another thread, which raises ServerFailure,
        or None where another rank does it. Called by all ranks that feed the server, for every bucket in which they
        have payloads.

        `others`: the ranks among them that do not look after the server.

        The memory is free again when the function has returned, or, where another rank does it, when the next bucket
        was prepared.
        """

    def close(self) -> None:
        """Release what was made for this server."""


class SharedTransport:
    """Transport to a server on the same machine, by handles of memory that the server opens."""

    def __init__(
        self, endpoint: Endpoint, shape: EngineShape, rank: int, timeout_seconds: float, numbers: Sequence[int]
    ) -> None:
        """`rank`: of this process; `numbers`: those of the server's ranks that open whole tensors of this rank."""
        self._endpoint, self._shape, self._rank, self._timeout = endpoint, shape, rank, timeout_seconds
        self._numbers = numbers

    def prepare(self, payloads: Loaded, others: Sequence[int]) -> Callable[[], None] | None:
        """See `Transport.prepare`. Each of the server's ranks opens a payload of its own, or all of them open the only
        one."""
        handles = {number: handle for payload, flat in payloads for number, handle in self._handles(payload, flat)}
        if self._rank != self._endpoint.sender:
            send_object(handles, self._endpoint.sender)
            receive_object(self._endpoint.sender)  # sent once the server has loaded the bucket before
            return None
        for rank in others:
            handles |= receive_object(rank)
        for rank in others:
            send_object(None, rank)
        load_format = LOADER if payloads[0][0].receiver.tp > 1 else "flattened_bucket"
        return partial(self._load, [handles[number] for number in sorted(handles)], load_format)

    def _handles(self, payload: ReceiverPayload, flat_bytes: Tensor) -> list[tuple[int, str]]:
        """Handles that ranks of the server open, each with the rank's number."""
        flat = flat_bytes[: payload.n_bytes]
        if payload.receiver.tp > 1:
            return [(payload.receiver.tensor_rank, serialize([(describe(self._places(payload)), flat)]))]
        flattened = flat_payload(flat, payload.slots)
        # One handle for each opening: torch counts openings of a handle, and removes the memory after the last.
        return [(number, serialize(flattened)) for number in self._numbers]

    def _places(self, payload: ReceiverPayload) -> list[SlicePlace]:
        """The places in the engine's parameters of a payload's runs of bytes."""
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
        """Do nothing: handles belong to the buffers, which outlive the transport."""


def flat_payload(flat_bytes: Tensor, slots: Sequence[Slot]) -> dict[str, Tensor | list[SimpleNamespace]]:
    """Content of SGLang's `flattened_bucket` format: uint8 (bytes,) and where each tensor lies in it."""
    # Plain records instead of SGLang's class: it reads the same attributes, and SGLang need not be imported.
    metadata = [
        SimpleNamespace(
            name=s.name, shape=s.shape, dtype=s.dtype, start_idx=s.start, end_idx=s.stop, numel=s.stop - s.start
        )
        for s in slots
    ]
    return {"flattened_tensor": flat_bytes, "metadata": metadata}


def serialize(payload: dict[str, Tensor | list[SimpleNamespace]] | list[tuple[str, Tensor]]) -> str:
    """Handles of a payload's tensors as base64, for one opening in one process of the server."""
    out = io.BytesIO()
    _HandlePickler(out).dump(payload)
    return base64.b64encode(out.getvalue()).decode()


class _HandlePickler(ForkingPickler):
    """Pickler of CUDA handles as a server can open them.

    The handle names the device by its UUID, as the server numbers its CUDA_VISIBLE_DEVICES differently; servers look
    for it (SGLang 0.5.23, srt/utils/patch_torch.py). The event that torch sends along for the other process to wait for
    is left out: weights are complete before their handles leave, and a server started in the place of a killed one
    cannot open such events (`cudaErrorMapBufferObjectFailed`, on an H100 with torch 2.11).
    """

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a CUDA tensor as torch does, but with the UUID in the place of `storage_device`, the seventh argument
        of `rebuild_cuda_tensor`, and with `event_sync_required`, the last, false."""
        if not (isinstance(obj, Tensor) and obj.is_cuda):
            return NotImplemented
        rebuild, arguments = torch.multiprocessing.reductions.reduce_tensor(obj)
        uuid = str(torch.cuda.get_device_properties(arguments[6]).uuid)
        return rebuild, (*arguments[:6], uuid, *arguments[7:-1], False)


def share_by_name() -> None:
    """Have handles of this process name shared memory. File descriptors, torch's default, need an authentication key
    that server and trainer do not share."""
    torch.multiprocessing.set_sharing_strategy("file_system")


def share_buffers(count: int, n_bytes: int) -> list[Tensor]:
    """Byte buffers on the CPU that other processes of this machine can open by handle."""
    return [torch.empty(n_bytes, dtype=torch.uint8).share_memory_() for _ in range(count)]


def buffer_handles(buffers: Sequence[Tensor]) -> bytes:
    """Pickled handles of buffers, for one `open_buffers` in one other process."""
    return bytes(ForkingPickler.dumps(list(buffers)))


def open_buffers(handles: bytes) -> list[Tensor]:
    """Map the buffers of another rank of the machine into this process."""
    found: list[Tensor] = ForkingPickler.loads(handles)
    return found


def address_towards(url: str) -> str:
    """The address at which a server reaches this machine. Raises ServerFailure where there is no route."""
    parts = urlsplit(url)
    try:
        return store.address_towards(parts.hostname or "", parts.port or 80)
    except OSError as error:
        raise ServerFailure(f"no way leads to {url} of rollout.sglang.urls ({error.strerror})") from None


class BroadcastTransport:
    """Transport over a process group of this rank (its rank 0) and the server's ranks, made for the first payload.
    Other ranks that feed the server have groups of their own with it; it takes one payload after the other."""

    def __init__(
        self, endpoint: Endpoint, tp: int, rank: int, address: str | None, timeout_seconds: float, backend: str
    ) -> None:
        """`rank`: of this process; `address`: where the server reaches this machine; None: the source address of
        packets to it."""
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
                answer.result()  # raises where the server refused, and the group would wait for ever
            return bool(work.is_completed())

        if not wait_until(is_taken, self._timeout, every_seconds=_POLL_SECONDS):
            raise ServerFailure(f"{self._endpoint.name} took no bucket within {self._timeout:g} seconds")
        try:
            work.wait()
        except RuntimeError as error:  # what torch raises where a peer of the group is gone
            raise ServerFailure(f"the broadcast to {self._endpoint.name} broke ({error})") from None
        answer.result()

    def _post(self, path: str, body: Mapping[str, JSONValue]) -> Future[dict[str, JSONValue]]:
        return self._pool.submit(call, self._endpoint, path, body, timeout_seconds=self._timeout)

    def _join(self) -> dist.ProcessGroup:
        """Make the group with the server's ranks, at a store of our own; torchrun's belongs to the trainers."""
        world, timeout = 1 + self._tp, datetime.timedelta(seconds=self._timeout)
        address = self._address or address_towards(self._endpoint.url)
        try:
            meeting = store.listening_store(address, 0, world, timeout)
        except (RuntimeError, OSError) as error:
            raise ServerFailure(
                f"no broadcast group can be made at rollout.sglang.sync_address {address} ({error})"
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
                # `new_group` takes ranks of the trainers' world alone, to which a server's do not belong.
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
        # The helper does not register a group's ranks as `new_group` does; `destroy_process_group` looks for them.
        dist.distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
        self._store, self._group = meeting, group
        return group

    def close(self) -> None:
        """Leave the group, also where the server is gone."""
        group, self._group = self._group, None
        if group is not None:
            leave_at_once(group)
        self._pool.shutdown(wait=False, cancel_futures=True)
