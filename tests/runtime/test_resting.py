"""Offloading of memory: tensors return with the same bytes, and parts can be read while they are offloaded."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import megappo.megatron  # noqa: F401 - prepares torch for machines without CUDA
from megappo.errors import RunError
from megappo.runtime.memory.resting import Movable, RestingPlace

CPU = torch.device("cpu")


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Return two tensors that share a storage with a gap, and one tensor of another type."""
    flat = torch.randn(1000)
    return flat[:400].view(20, 20), flat[500:], torch.randn(33).bfloat16()


def bytes_on_device(*tensors: Tensor) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("block_bytes", [64, 4096, 2**28])
def test_offloaded_tensors_are_restored(tmp_path: Path, block_bytes: int) -> None:
    moved, place = tensors(), RestingPlace(CPU, tmp_path, block_bytes)
    before, movable = [t.clone() for t in moved], Movable(place)
    assert bytes_on_device(*moved) == 4066
    movable.leave(moved)
    assert bytes_on_device(*moved) == 0 and place.n_bytes == 4066
    assert not list(tmp_path.iterdir())  # the file has no name and is removed when the process ends
    movable.restore()
    movable.arrive()
    assert all(torch.equal(a, b) for a, b in zip(moved, before, strict=True))
    for t in moved:
        t.mul_(2)
    movable.leave(moved)
    movable.restore()
    assert all(torch.equal(a, 2 * b) for a, b in zip(moved, before, strict=True))
    assert place.n_bytes == 4066


@pytest.mark.parametrize("block_bytes", [64, 4096])
def test_part_of_an_offloaded_tensor_is_read(tmp_path: Path, block_bytes: int) -> None:
    first, second, third = moved = tensors()
    before, movable = [t.clone().flatten() for t in moved], Movable(RestingPlace(CPU, tmp_path, block_bytes))
    assert movable.read(second, slice(3, 9)) is None
    movable.leave(moved)
    for t, was in zip(moved, before, strict=True):
        for part in (slice(None), slice(7, 30), slice(5, 5)):
            values = movable.read(t, part)
            assert values is not None and torch.equal(values, was[part])
    assert movable.read(torch.zeros(3), slice(None)) is None
    assert bytes_on_device(first, second, third) == 0


def test_unchanged_tensor_is_not_copied_again(tmp_path: Path) -> None:
    """Undeclared changes are lost, because the old copy is restored."""
    weight, movable = torch.ones(8), Movable(RestingPlace(CPU, tmp_path))
    movable.leave([weight])
    movable.restore(unchanged=True)
    weight.fill_(2)
    movable.leave([weight])
    movable.restore(unchanged=True)
    assert torch.equal(weight, torch.ones(8))
    movable.restore()  # the tensor is already on the device and will change
    weight.fill_(3)
    movable.leave([weight])
    movable.restore()
    assert torch.equal(weight, torch.full((8,), 3.0))


def test_new_tensors_are_offloaded(tmp_path: Path) -> None:
    """The moments of an optimizer exist after the first update."""
    place = RestingPlace(CPU, tmp_path, 16)
    main, movable = torch.ones(5), Movable(place)
    movable.leave([main], reserve_bytes=60)
    assert place.n_bytes == 60
    movable.restore(unchanged=True)
    moment = torch.full((7,), 4.0)
    movable.leave([moment, main])
    assert bytes_on_device(main, moment) == 0 and place.n_bytes == 60
    movable.restore()
    assert main.tolist() == [1] * 5 and moment.tolist() == [4] * 7


def test_memory_is_released_without_a_copy() -> None:
    gradients, movable = torch.ones(1000), Movable()
    movable.leave([gradients])
    assert bytes_on_device(gradients) == 0 and movable.read(gradients, slice(None)) is None
    movable.leave([gradients])
    movable.restore()
    assert bytes_on_device(gradients) == 4000


def test_full_disk_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    message = rf"does not fit in {tmp_path}: No space left on device; set runtime.offload_dir"
    with pytest.raises(RunError, match=message):
        RestingPlace(CPU, tmp_path).reserve(10)
