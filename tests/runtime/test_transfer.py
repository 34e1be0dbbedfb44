"""What a microbatch needs reaches the device in one copy, which the host does not wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megappo.megatron.schedule import PackedBatch, PlacedSample, pack_samples
from megappo.runtime.exchange import exchange, make_routes
from megappo.runtime.transfer import ALIGNMENT, to_device
from tests.support.workers.reads_worker import Copies

LENGTHS, RESPONSES = (5, 9, 6), (2, 3, 1)


def samples() -> list[PlacedSample]:
    """Tokens and fields that tell where they come from."""
    return [
        PlacedSample(10 + i, torch.arange(n) + 100 * i, r, {"old": torch.arange(r) + i / 8, "mask": torch.ones(r)})
        for i, (n, r) in enumerate(zip(LENGTHS, RESPONSES, strict=True))
    ]


def tensors_of(batch: PackedBatch) -> list[Tensor]:
    segments = batch.segments
    assert segments.slots is not None
    found = [batch.tokens_1l, batch.rows_N, batch.labels_N, batch.sequences_N, *batch.fields_W.values()]
    return [*found, segments.cu_seqlens_q, segments.cu_seqlens_kv, segments.positions, segments.slots]


class Crossings(TorchDispatchMode):
    """The copies from one device to another, and whether the memory that is made for them is pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[bool] = []
        self.pinned = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        name = func.overloadpacket.__name__
        self.pinned += name == "empty" and bool(given.get("pin_memory"))
        if name == "_to_copy" and out.device != args[0].device:
            self.waiting.append(not given.get("non_blocking"))
        if name == "copy_" and args[0].device != args[1].device:
            self.waiting.append(not (args[2] if len(args) > 2 else given.get("non_blocking", False)))
        return out


@pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA")
def test_a_microbatch_is_one_copy_from_pinned_memory(torchs_factories: None) -> None:
    """To a CUDA device that is played: tensors there have no values, so that whoever waited for one would fail."""
    with FakeTensorMode(allow_non_fake_inputs=True), Crossings() as crossings:
        batch = pack_samples(samples(), torch.device("cuda:0"), multiple_of=8)
    assert crossings.waiting == [False] and crossings.pinned == 1
    assert {tensor.device.type for tensor in tensors_of(batch)} == {"cuda"}


def test_no_other_device_is_asked_for_pinned_memory() -> None:
    with Crossings() as crossings:
        batch = pack_samples(samples(), torch.device("meta"))
    assert crossings.waiting == [False] and crossings.pinned == 0
    assert all(tensor.is_meta for tensor in tensors_of(batch))


def test_what_arrives_is_what_was_packed() -> None:
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


def test_tensors_of_all_sizes_keep_shape_type_and_place() -> None:
    """Also without elements, of one byte, and not contiguous; each begins where kernels can load 16 bytes at once."""
    given = {
        "none": torch.empty(0, 3),
        "byte": torch.tensor([True]),
        "turned": torch.arange(6.0).view(2, 3).T,
        "number": torch.tensor(7, dtype=torch.int64),
        "half": torch.tensor([1.5, 2.5, 3.5], dtype=torch.bfloat16),
    }
    found = to_device(given, torch.device("cpu"))
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        assert found[name].storage_offset() * tensor.itemsize % ALIGNMENT == 0
        assert not tensor.numel() or found[name].data_ptr() != tensor.data_ptr()
    assert to_device({}, torch.device("cpu")) == {}


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def copies_of_exchange(samples: int) -> int:
    """Tensors that are copied between host and device where so many go to another rank."""
    ids, device = range(samples), torch.device("cpu")
    routes = make_routes(dict.fromkeys(ids, 0), {i: [0] for i in ids}, own=0)
    given = {i: torch.full((i + 1,), float(i)) for i in ids}
    with Copies() as copies:
        found = exchange(given, routes, {i: i + 1 for i in ids}, dtype=torch.float32, device=device)
    assert all(torch.equal(found[i], given[i]) for i in ids)
    return copies.count


def test_results_are_read_together(alone: None) -> None:
    """However many samples there are: once on the way there, once on the way back."""
    assert copies_of_exchange(9) == copies_of_exchange(1) == 2
