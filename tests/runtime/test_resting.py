"""Memory that leaves the device and comes back: the same bytes in any number of pieces, parts of them meanwhile."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import megappo.megatron  # noqa: F401 - prepares torch for machines without CUDA
from megappo.errors import RunError
from megappo.runtime.resting import Movable, RestingPlace

CPU = torch.device("cpu")


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Two that share a storage, with a hole between them, and one of another type."""
    flat = torch.randn(1000)
    return flat[:400].view(20, 20), flat[500:], torch.randn(33).bfloat16()


def bytes_on_device(*given: Tensor) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in given}.values())


@pytest.mark.parametrize("block_bytes", [64, 4096, 2**28])
def test_what_left_comes_back(tmp_path: Path, block_bytes: int) -> None:
    moved, place = tensors(), RestingPlace(CPU, tmp_path, block_bytes)
    before, movable = [t.clone() for t in moved], Movable(place)
    assert bytes_on_device(*moved) == 4066
    movable.leave(moved)
    assert bytes_on_device(*moved) == 0 and place.n_bytes == 4066
    assert not list(tmp_path.iterdir())  # the file has no name, and ends with the process
    movable.come_back()
    movable.arrive()
    assert all(torch.equal(a, b) for a, b in zip(moved, before, strict=True))
    for t in moved:
        t.mul_(2)
    movable.leave(moved)
    movable.come_back()
    assert all(torch.equal(a, 2 * b) for a, b in zip(moved, before, strict=True))
    assert place.n_bytes == 4066


@pytest.mark.parametrize("block_bytes", [64, 4096])
def test_a_part_is_read_where_it_lies(tmp_path: Path, block_bytes: int) -> None:
    first, second, third = moved = tensors()
    before, movable = [t.clone().flatten() for t in moved], Movable(RestingPlace(CPU, tmp_path, block_bytes))
    assert movable.read(second, slice(3, 9)) is None
    movable.leave(moved)
    for t, was in zip(moved, before, strict=True):
        for part in (slice(None), slice(7, 30), slice(5, 5)):
            found = movable.read(t, part)
            assert found is not None and torch.equal(found, was[part])
    assert movable.read(torch.zeros(3), slice(None)) is None
    assert bytes_on_device(first, second, third) == 0


def test_what_was_only_read_is_not_copied_again(tmp_path: Path) -> None:
    """Changes that nobody announced are lost: the copy is what comes back."""
    weight, movable = torch.ones(8), Movable(RestingPlace(CPU, tmp_path))
    movable.leave([weight])
    movable.come_back(unchanged=True)
    weight.fill_(2)
    movable.leave([weight])
    movable.come_back(unchanged=True)
    assert torch.equal(weight, torch.ones(8))
    movable.come_back()  # of what is there already: it will be changed
    weight.fill_(3)
    movable.leave([weight])
    movable.come_back()
    assert torch.equal(weight, torch.full((8,), 3.0))


def test_what_is_new_leaves_with_the_rest(tmp_path: Path) -> None:
    """An optimizer has its moments from the first update on."""
    place = RestingPlace(CPU, tmp_path, 16)
    main, movable = torch.ones(5), Movable(place)
    movable.leave([main], reserve_bytes=60)
    assert place.n_bytes == 60
    movable.come_back(unchanged=True)
    moment = torch.full((7,), 4.0)
    movable.leave([moment, main])
    assert bytes_on_device(main, moment) == 0 and place.n_bytes == 60
    movable.come_back()
    assert main.tolist() == [1] * 5 and moment.tolist() == [4] * 7


def test_without_a_place_only_the_memory_is_given_up() -> None:
    gradients, movable = torch.ones(1000), Movable()
    movable.leave([gradients])
    assert bytes_on_device(gradients) == 0 and movable.read(gradients, slice(None)) is None
    movable.leave([gradients])
    movable.come_back()
    assert bytes_on_device(gradients) == 4000


def test_a_full_disk_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        RunError, match=rf"does not fit in {tmp_path}: No space left on device; set runtime.offload_dir"
    ):
        RestingPlace(CPU, tmp_path).reserve(10)
