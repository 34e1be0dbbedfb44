"""Selection of a checkpoint by name, the digest of weights, and the state of a run that is restored."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megappo.checkpoint import files
from megappo.checkpoint.changes import keep_kl_unit
from megappo.checkpoint.identity import weights_digest
from megappo.checkpoint.randomness import random_states, restore_random_states, seed_generators
from megappo.checkpoint.reader import load_values
from megappo.checkpoint.select import NoCheckpointError, find_checkpoint
from megappo.checkpoint.writer import CheckpointWriter
from megappo.config import Config, load_config
from megappo.config.schema import CheckpointSettings
from megappo.runtime.process import Runtime
from tests.support.checkpoints import snapshot
from tests.support.places import BASE


@pytest.fixture(scope="module")
def world() -> Iterator[Runtime]:
    """Start a process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Runtime(0, 1, 0, torch.device("cpu"))
    dist.destroy_process_group()


def written(directory: Path, world: Runtime, settings: Mapping[str, Any] | None, rewards: list[float]) -> Path:
    """Write checkpoints of steps 1, 2, ... of a run with these `checkpoint` settings."""
    writer = CheckpointWriter(directory, CheckpointSettings(keep_last=99), world, 60)
    for step, reward in enumerate(rewards, 1):
        plain = snapshot(step, reward)
        content = {**plain.content, "settings": {"checkpoint": settings}}
        writer.save(dataclasses.replace(plain, content=content), wait=True)
    return directory


@pytest.mark.parametrize("alone", [True, False])
def test_checkpoint_is_selected_by_name(tmp_path: Path, world: Runtime, alone: bool) -> None:
    runtime = None if alone else world
    directory = written(tmp_path / "a", world, {"keep_best": "reward/mean"}, [0.1, 0.3, 0.3, 0.2])
    for selector, step in (("1", 1), ("4", 4), ("best", 3), ("latest", 4)):
        folder, marker, sentences = find_checkpoint(directory, selector, runtime)
        assert (folder, marker.step, sentences) == (directory / f"step-00000{step}", step, [])
    with pytest.raises(ValueError) as refused:
        find_checkpoint(directory, "5", runtime)
    assert str(refused.value) == (
        f"{directory} contains no checkpoint of step '5'; finished steps: 1, 2, 3, 4; name a step, best or latest"
    )
    lowest = written(tmp_path / "b", world, {"keep_best": "-reward/mean"}, [0.1, 0.3])
    assert find_checkpoint(lowest, "best", runtime)[1].step == 1
    only = written(tmp_path / "c", world, {"keep_best": "reward/mean"}, [0.1])
    assert find_checkpoint(only, "best", runtime)[1].step == 1


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("settings", "steps", "selector", "message"),
    [
        ({"keep_best": None}, 2, "best", "has no checkpoint.keep_best to select the best; finished steps: 1, 2; name"),
        (None, 2, "best", "has no checkpoint.keep_best to select the best; finished steps: 1, 2; name"),
        ({"keep_best": "time"}, 2, "best", "no checkpoint in .* has the metric 'time'; finished steps: 1, 2"),
        (None, 0, "best", "has no checkpoint.keep_best to select the best; no checkpoint is finished; name"),
        (None, 0, "1", "contains no checkpoint of step '1'; no checkpoint is finished; name a step"),
        (None, 0, "latest", "contains no finished checkpoint; wait for the first checkpoint of the run"),
    ],
)
def test_missing_checkpoints_are_reported(
    tmp_path: Path, world: Runtime, alone: bool, settings: Any, steps: int, selector: str, message: str
) -> None:
    directory = written(tmp_path / "run", world, settings, [0.1] * steps)
    with pytest.raises(ValueError, match=message):
        find_checkpoint(directory, selector, None if alone else world)


@pytest.mark.parametrize("alone", [True, False])
def test_damaged_checkpoint_is_not_selected(tmp_path: Path, world: Runtime, alone: bool) -> None:
    runtime = None if alone else world
    directory = written(tmp_path, world, None, [0.1, 0.2])
    (directory / "step-000001" / "random-00000.pt").write_bytes(b"")
    with pytest.raises(NoCheckpointError, match=r"step-000001 is damaged: random-00000.pt has 0 bytes .*; use another"):
        find_checkpoint(directory, "1", runtime)
    assert (
        find_checkpoint(directory, "2", runtime)[1].step == find_checkpoint(directory, "latest", runtime)[1].step == 2
    )


@pytest.mark.usefixtures("world")
def test_digest_of_weights_covers_every_bit_and_name() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(0)}

    def digest(**changes: Tensor) -> str:
        return weights_digest({**tensors, **changes}.items())

    assert weights_digest(reversed(tensors.items())) == digest() == digest(a=tensors["a"].t().clone().t())
    nudged = tensors["a"].clone()
    nudged[1, 2] = torch.nextafter(nudged[1, 2], torch.tensor(9.0))
    renamed = weights_digest([("a", tensors["a"]), ("d", tensors["b"])])
    others = [digest(a=nudged), digest(b=-tensors["b"]), digest(d=tensors["c"]), renamed]
    assert len({digest(), *others}) == 1 + len(others)


def test_generators_of_a_device_are_restored(world: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device exists both at the checkpoint and at the restore."""
    restored: list[Tensor] = []
    on_cpu = random_states()
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([7]))
    assert on_cpu["cuda"] is None and random_states()["cuda"] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_cuda = random_states()
    restore_random_states(on_cpu)
    assert restored == []
    restore_random_states(on_cuda)
    assert restored == [torch.tensor([7])]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    restore_random_states(on_cuda)
    assert len(restored) == 1


def test_ranks_and_seeds_have_different_random_numbers() -> None:
    import numpy as np

    def drawn(seed: int, rank: int) -> tuple[float, float, float]:
        seed_generators(seed, rank)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    first = drawn(1, 0)
    assert drawn(1, 0) == first
    assert all(a != b for other in (drawn(1, 1), drawn(2, 0)) for a, b in zip(first, other, strict=True))


def test_every_value_of_a_rank_has_a_file(tmp_path: Path, world: Runtime) -> None:
    writer = CheckpointWriter(tmp_path, CheckpointSettings(), world, 60)
    values = {"random": [1, 2], "responses": {"ids": torch.arange(3)}}
    writer.save(dataclasses.replace(snapshot(1), per_rank=values), wait=True)
    folder = tmp_path / "step-000001"
    assert load_values(folder / "random-00000.pt") == [1, 2]
    assert load_values(folder / "responses-00000.pt")["ids"].tolist() == [0, 1, 2]
    assert {"random-00000.pt", "responses-00000.pt", ".metadata"} <= files.read_marker(folder).files.keys()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_writing_can_be_awaited(
    tmp_path: Path, world: Runtime, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """A checkpoint is written in the background only if the setting requests it. A failing run waits for a limited
    time."""
    really, go_on = files.write_marker, threading.Event()

    def slow(folder: Path, marker: files.Marker) -> None:
        assert go_on.wait(timeout=1 if asynchronous else 0.2) or not asynchronous
        really(folder, marker)

    monkeypatch.setattr(files, "write_marker", slow)
    writer = CheckpointWriter(tmp_path, CheckpointSettings(asynchronous=asynchronous), world, 60)
    writer.abandon(0.0)
    writer.save(snapshot(1), wait=False)
    assert (tmp_path / "step-000001" / files.MARKER).exists() != asynchronous
    writer.abandon(0.01)
    assert (tmp_path / "step-000001" / files.MARKER).exists() != asynchronous
    go_on.set()
    writer.abandon(60.0)
    assert (tmp_path / "step-000001" / files.MARKER).exists()
    writer.wait()


def with_kl(*changes: str) -> Config:
    return load_config(BASE, [f"algorithm.kl_in_reward={{{', '.join(('kind: kl', 'coef: 0.1', *changes))}}}"])


@pytest.mark.parametrize(
    ("before", "changes", "per", "target"),
    [
        ({"per": "token", "target": 3.0}, (), "token", 3.0),
        ({"target": 3.0}, (), "response", 3.0),  # a checkpoint without the setting
        ({"per": "token", "target": 3.0}, ("target: 5.0",), "token", 5.0),
        ({"per": "token", "target": 3.0}, ("per: token",), "token", 3.0),
        ({"per": "token", "target": 3.0}, ("per: response",), "response", None),  # the unit of the target differs
        ({"per": "response", "target": 3.0}, ("per: token", "target: 0.5"), "token", 0.5),
    ],
)
def test_unit_of_kl_is_unchanged(
    before: dict[str, Any], changes: tuple[str, ...], per: str, target: float | None
) -> None:
    config = with_kl(*changes)
    default = config.algorithm.kl_in_reward
    assert default is not None
    old, adapted = keep_kl_unit({"algorithm": {"kl_in_reward": before, "lam": 0.9}}, config)
    kl = adapted.algorithm.kl_in_reward
    assert kl is not None and (kl.per, kl.target) == (per, default.target if target is None else target)
    assert old == {"algorithm": {"kl_in_reward": {"per": "response", **before}, "lam": 0.9}}
    none: dict[str, Any] = {"algorithm": {"kl_in_reward": None}}
    assert keep_kl_unit(none, config) == (none, config)
