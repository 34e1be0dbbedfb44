"""How a bucket of weights gets from this process into one server.

On the same machine only a handle travels: the bucket lies in shared memory (CPU) or is opened by CUDA IPC, and every
server rank reads its own part of it. Elsewhere a process group of this rank and the server's ranks broadcasts it.
"""

from __future__ import annotations

import base64
import datetime
import io
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.engines.sglang.client import Endpoint, ServerFailure, call
from megappo.reshard.stream import Bucket, Slot
from megappo.runtime.store import listening_store
from megappo.runtime.waiting import wait_until

_POLL_SECONDS = 0.002


class Transport(Protocol):
    """Brings buckets into one server."""

    def load(self, bucket: Bucket, flat_bytes: Tensor) -> None:
        """Return when the server has taken the bucket over. Raises ServerFailure."""
        ...

    def close(self) -> None:
        """Release what was made for this server."""
        ...


class SharedTransport:
    """Handles of memory that the server opens."""

    def __init__(self, endpoint: Endpoint, tp: int, timeout_seconds: float) -> None:
        self._endpoint, self._tp, self._timeout = endpoint, tp, timeout_seconds

    def load(self, bucket: Bucket, flat_bytes: Tensor) -> None:
        """See `Transport.load`."""
        payload = flat_payload(flat_bytes[: bucket.n_bytes], bucket.slots)
        call(
            self._endpoint,
            "/update_weights_from_tensor",
            {
                # A handle may be opened once: torch counts openings, and removes the memory after the last.
                "serialized_named_tensors": [serialize(payload) for _ in range(self._tp)],
                "load_format": "flattened_bucket",
                "flush_cache": False,
            },
            timeout_seconds=self._timeout,
        )

    def close(self) -> None:
        """The handles belong to the buffers, which outlive the transport."""


def flat_payload(flat_bytes: Tensor, slots: Sequence[Slot]) -> dict[str, Any]:
    """What SGLang's `flattened_bucket` holds: uint8 (bytes,) and where each tensor lies in it."""
    # Plain records instead of SGLang's class: it reads the same attributes, and SGLang need not be imported.
    metadata = [
        SimpleNamespace(
            name=s.name, shape=s.shape, dtype=s.dtype, start_idx=s.start, end_idx=s.stop, numel=s.stop - s.start
        )
        for s in slots
    ]
    return {"flattened_tensor": flat_bytes, "metadata": metadata}


def serialize(payload: Any) -> str:
    """Handles of the payload's tensors, for one opening in one process of the server."""
    if torch.cuda.is_available():
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()  # handles then name the device by its UUID
    out = io.BytesIO()
    ForkingPickler(out).dump(payload)
    return base64.b64encode(out.getvalue()).decode()


def share_by_name() -> None:
    """Let handles of this process name memory. File descriptors, torch's other way, need an authentication key that
    server and trainer do not share."""
    torch.multiprocessing.set_sharing_strategy("file_system")


def share_buffers(count: int, n_bytes: int) -> list[Tensor]:
    """Byte buffers on the CPU that other processes of this machine can open by handle."""
    return [torch.empty(n_bytes, dtype=torch.uint8).share_memory_() for _ in range(count)]


def buffer_handles(buffers: Sequence[Tensor]) -> bytes:
    """What `open_buffers` needs in one other process; good for one opening."""
    out = io.BytesIO()
    ForkingPickler(out).dump(list(buffers))
    return out.getvalue()


def open_buffers(handles: bytes) -> list[Tensor]:
    """Map the first rank's buffers into the process of another rank of the machine."""
    found: list[Tensor] = ForkingPickler.loads(handles)
    return found


def address_towards(url: str) -> str:
    """The address that this machine's packets to a server bear. Raises ServerFailure where no way leads there."""
    parts = urlsplit(url)
    try:
        family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ServerFailure(f"no way leads to {url} of rollout.sglang.urls ({error.strerror})") from None


class BroadcastTransport:
    """A process group of this rank (its rank 0) and the server's ranks, made when the first bucket is sent."""

    def __init__(self, endpoint: Endpoint, tp: int, address: str | None, timeout_seconds: float, backend: str) -> None:
        """`address`: where the server finds this machine; None: where its packets come from."""
        self._endpoint, self._tp, self._address = endpoint, tp, address
        self._timeout, self._backend = timeout_seconds, backend
        self._group: dist.ProcessGroup | None = None
        self._name = f"megappo-{endpoint.index}-{endpoint.starts}-{time.monotonic_ns()}"
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="megappo-sync")

    def load(self, bucket: Bucket, flat_bytes: Tensor) -> None:
        """See `Transport.load`."""
        group = self._group or self._join()
        body = {
            "names": [s.name for s in bucket.slots],
            "dtypes": [str(s.dtype).removeprefix("torch.") for s in bucket.slots],
            "shapes": [list(s.shape) for s in bucket.slots],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        answer = self._post("/update_weights_from_distributed", body)
        work = group.broadcast(flat_bytes[: bucket.n_bytes], 0)

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

    def _post(self, path: str, body: dict[str, Any]) -> Future[dict[str, Any]]:
        return self._pool.submit(call, self._endpoint, path, body, timeout_seconds=self._timeout)

    def _join(self) -> dist.ProcessGroup:
        """Meet the server's ranks at a store of our own; torchrun's belongs to the trainers."""
        world, timeout = 1 + self._tp, datetime.timedelta(seconds=self._timeout)
        address = self._address or address_towards(self._endpoint.url)
        try:
            store = listening_store(address, 0, world, timeout, wait_for_workers=False)
        except (RuntimeError, OSError) as error:
            raise ServerFailure(
                f"no broadcast group can be made at rollout.sglang.sync_address {address} ({error})"
            ) from None
        answer = self._post(
            "/init_weights_update_group",
            {
                "master_address": address,
                "master_port": store.port,
                "rank_offset": 1,
                "world_size": world,
                "group_name": self._name,
                "backend": self._backend,
            },
        )
        try:
            group, _ = dist.distributed_c10d._new_process_group_helper(
                world,
                0,
                [],
                dist.Backend(self._backend),
                dist.PrefixStore(self._name, store),
                group_name=cast(Any, self._name),
                timeout=timeout,
            )
        except RuntimeError as error:
            raise ServerFailure(f"{self._endpoint.name} did not join the broadcast group ({error})") from None
        answer.result()
        assert isinstance(group, dist.ProcessGroup)
        self._store, self._group = store, group
        return group

    def close(self) -> None:
        """Leave the group; its server may be gone."""
        self._group = None
        self._pool.shutdown(wait=False, cancel_futures=True)
