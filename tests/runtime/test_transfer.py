"""Transfer of a microbatch to the device, in one asynchronous copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megappo.megatron.schedule import PackedBatch, PlacedSample, pack_samples
from megappo.runtime.memory.transfer import ALIGNMENT, to_device
from megappo.runtime.ranks.exchange import exchange, make_routes
from tests.support.workers.reads_worker import Copies

LENGTHS, RESPONSES = (5, 9, 6), (2, 3, 1)


def samples() -> list[PlacedSample]:
    """Return samples with distinct tokens and fields."""
    return [
        PlacedSample(10 + i, torch.arange(n) + 100 * i, r, {"old": torch.arange(r) + i / 8, "mask": torch.ones(r)})
        for i, (n, r) in enumerate(zip(LENGTHS, RESPONSES, strict=True))
    ]


def tensors_of(batch: PackedBatch) -> list[Tensor]:
    segments = batch.segments
    assert segments.slots is not None
    tensors = [batch.tokens_1l, batch.rows_N, batch.labels_N, batch.sequences_N, *batch.fields_W.values()]
    return [*tensors, segments.cu_seqlens_q, segments.cu_seqlens_kv, segments.positions, segments.slots]


class CopyRecorder(TorchDispatchMode):
    """Recorder of copies between devices, and of allocations of pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[bool] = []
        self.pinned = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        out = func(*args, **options)
        name = func.overloadpacket.__name__
        self.pinned += name == "empty" and bool(options.get("pin_memory"))
        if name == "_to_copy" and out.device != args[0].device:
            self.waiting.append(not options.get("non_blocking"))
        if name == "copy_" and args[0].device != args[1].device:
            self.waiting.append(not (args[2] if len(args) > 2 else options.get("non_blocking", False)))
        return out


@pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA")
def test_microbatch_is_one_copy_from_pinned_memory(torchs_factories: None) -> None:
    """The CUDA device is simulated. Its tensors have no values, so that a wait for a value would fail."""
    with FakeTensorMode(allow_non_fake_inputs=True), CopyRecorder() as crossings:
        batch = pack_samples(samples(), torch.device("cuda:0"), multiple_of=8)
    assert crossings.waiting == [False] and crossings.pinned == 1
    assert {tensor.device.type for tensor in tensors_of(batch)} == {"cuda"}


def test_other_devices_need_no_pinned_memory() -> None:
    with CopyRecorder() as crossings:
        batch = pack_samples(samples(), torch.device("meta"))
    assert crossings.waiting == [False] and crossings.pinned == 0
    assert all(tensor.is_meta for tensor in tensors_of(batch))


def test_transferred_batch_equals_packed_batch() -> None:
    batch = pack_samples(samples(), torch.device("cpu"), multiple_of=8)
    tokens = [*range(5), *range(100, 109), *range(200, 206), *[0] * 4]
    rows = [2, 3, 10, 11, 12, 18]
    assert batch.tokens_1l.tolist() == [tokens] and batch.rows_N.tolist() == rows
    assert batch.labels_N.tolist() == [tokens[row + 1] for row in rows]
    assert batch.sequences_N.tolist() == [0, 0, 1, 1, 1, 2]
    assert batch.fields_W["old"].tolist() == [0, 1, 1 / 8, 9 / 8, 17 / 8, 2 / 8]
    assert batch.segments.lengths == (5, 9, 6, 4) and batch.segments.cu_seqlens_q.tolist() == [0, 5, 14, 20, 24]
    assert batch.segments.positions.tolist() == [*range(5), *range(9), *range(6), *range(4)]
    assert batch.segments.slots is not None and batch.segments.slots[5:14].tolist() == [*range(9, 18)]
    types = [tensor.dtype for tensor in tensors_of(batch)]
    assert types == [torch.int64] * 4 + [torch.float32] * 2 + [torch.int32] * 2 + [torch.int64] * 2


def test_tensors_of_all_sizes_are_transferred() -> None:
    """This includes tensors that are empty, of one byte or not contiguous. Each tensor is aligned to 16 bytes."""
    tensors = {
        "none": torch.empty(0, 3), "byte": torch.tensor([True]), "turned": torch.arange(6.0).view(2, 3).T,
        "number": torch.tensor(7, dtype=torch.int64), "half": torch.tensor([1.5, 2.5, 3.5], dtype=torch.bfloat16),
    }  # fmt: skip
    copies = to_device(tensors, torch.device("cpu"))
    assert copies.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert copies[name].dtype == tensor.dtype and torch.equal(copies[name], tensor), name
        assert copies[name].storage_offset() * tensor.itemsize % ALIGNMENT == 0
        assert not tensor.numel() or copies[name].data_ptr() != tensor.data_ptr()
    assert to_device({}, torch.device("cpu")) == {}


def copies_of_exchange(samples: int) -> int:
    """Return the number of copies between host and device for an exchange of this many samples."""
    ids, device = range(samples), torch.device("cpu")
    routes = make_routes(dict.fromkeys(ids, 0), {i: [0] for i in ids}, own=0)
    values = {i: torch.full((i + 1,), float(i)) for i in ids}
    with Copies() as copies:
        received = exchange(values, routes, {i: i + 1 for i in ids}, dtype=torch.float32, device=device)
    assert all(torch.equal(received[i], values[i]) for i in ids)
    return copies.count


def test_results_are_read_together(world_of_one: None) -> None:
    """The number of copies does not depend on the number of samples: one copy in each direction."""
    assert copies_of_exchange(9) == copies_of_exchange(1) == 2
