"""Times of checkpoints, selection of a checkpoint by name, the digest of weights, and the state of a restored run."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megappo.checkpoint import files
from megappo.checkpoint.changes import Changes, compare_settings, keep_kl_unit
from megappo.checkpoint.clock import Clock, Deadline
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


def written(directory: Path, runtime: Runtime, settings: Mapping[str, Any] | None, rewards: list[float]) -> Path:
    """Write checkpoints of steps 1, 2, ... of a run with these `checkpoint` settings."""
    writer = CheckpointWriter(directory, CheckpointSettings(keep_last=99), runtime, 60)
    for step, reward in enumerate(rewards, 1):
        plain = snapshot(step, reward)
        content = {**plain.content, "settings": {"checkpoint": settings}}
        writer.save(dataclasses.replace(plain, content=content), wait=True)
    return directory


@pytest.mark.parametrize("alone", [True, False])
def test_checkpoint_is_selected_by_name(tmp_path: Path, runtime: Runtime, alone: bool) -> None:
    reader = None if alone else runtime
    directory = written(tmp_path / "a", runtime, {"keep_best": "reward/mean"}, [0.1, 0.3, 0.3, 0.2])
    for selector, step in (("1", 1), ("4", 4), ("best", 3), ("latest", 4)):
        folder, marker, sentences = find_checkpoint(directory, selector, reader)
        assert (folder, marker.step, sentences) == (directory / f"step-00000{step}", step, [])
    with pytest.raises(ValueError) as refused:
        find_checkpoint(directory, "5", reader)
    message = f"{directory} contains no checkpoint of step '5'; finished steps: 1, 2, 3, 4; name a step, best or latest"
    assert str(refused.value) == message
    lowest = written(tmp_path / "b", runtime, {"keep_best": "-reward/mean"}, [0.1, 0.3])
    assert find_checkpoint(lowest, "best", reader)[1].step == 1
    only = written(tmp_path / "c", runtime, {"keep_best": "reward/mean"}, [0.1])
    assert find_checkpoint(only, "best", reader)[1].step == 1


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
    tmp_path: Path, runtime: Runtime, alone: bool, settings: Any, steps: int, selector: str, message: str
) -> None:
    directory = written(tmp_path / "run", runtime, settings, [0.1] * steps)
    with pytest.raises(ValueError, match=message):
        find_checkpoint(directory, selector, None if alone else runtime)


@pytest.mark.parametrize("alone", [True, False])
def test_damaged_checkpoint_is_not_selected(tmp_path: Path, runtime: Runtime, alone: bool) -> None:
    reader = None if alone else runtime
    directory = written(tmp_path, runtime, None, [0.1, 0.2])
    (directory / "step-000001" / "random-00000.pt").write_bytes(b"")
    with pytest.raises(NoCheckpointError, match=r"step-000001 is damaged: random-00000.pt has 0 bytes .*; use another"):
        find_checkpoint(directory, "1", reader)
    assert find_checkpoint(directory, "2", reader)[1].step == find_checkpoint(directory, "latest", reader)[1].step == 2


@pytest.mark.usefixtures("world_of_one")
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


def test_generators_of_a_device_are_restored(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_every_value_of_a_rank_has_a_file(tmp_path: Path, runtime: Runtime) -> None:
    writer = CheckpointWriter(tmp_path, CheckpointSettings(), runtime, 60)
    values = {"random": [1, 2], "responses": {"ids": torch.arange(3)}}
    writer.save(dataclasses.replace(snapshot(1), per_rank=values), wait=True)
    folder = tmp_path / "step-000001"
    assert load_values(folder / "random-00000.pt") == [1, 2]
    assert load_values(folder / "responses-00000.pt")["ids"].tolist() == [0, 1, 2]
    assert {"random-00000.pt", "responses-00000.pt", ".metadata"} <= files.read_marker(folder).files.keys()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_writing_can_be_awaited(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """A checkpoint is written in the background only if the setting requests it. A failing run waits for a limited
    time."""
    really, go_on = files.write_marker, threading.Event()

    def slow(folder: Path, marker: files.Marker) -> None:
        assert go_on.wait(timeout=1 if asynchronous else 0.2) or not asynchronous
        really(folder, marker)

    monkeypatch.setattr(files, "write_marker", slow)
    writer = CheckpointWriter(tmp_path, CheckpointSettings(asynchronous=asynchronous), runtime, 60)
    writer.abandon(0.0)
    writer.save(snapshot(1), wait=False)
    assert (tmp_path / "step-000001" / files.MARKER).exists() != asynchronous
    writer.abandon(0.01)
    assert (tmp_path / "step-000001" / files.MARKER).exists() != asynchronous
    go_on.set()
    writer.abandon(60.0)
    assert (tmp_path / "step-000001" / files.MARKER).exists()
    writer.wait()


def test_changed_settings_are_classified() -> None:
    before: dict[str, Any] = {
        "run": {"seed": 1, "steps": 10, "name": "a"},
        "model": {"path": "m"},
        "actor": {"optimizer": {"schedule": "constant", "learning_rate": 1e-3}},
        "reference": None,
    }
    now: dict[str, Any] = {
        "run": {"seed": 1, "steps": 20, "name": "b"},
        "model": {"path": "m"},
        "actor": {"optimizer": {"schedule": "constant", "learning_rate": 1e-4}},
        "reference": {"path": "r"},
    }
    read_again = json.loads(json.dumps(before))
    assert compare_settings(before, read_again, (10, 10)) == Changes((), ())
    old_form = {**before, "algorithm": {"lam": 0.9}}  # the form before separate lambdas of roles
    own_lambdas: dict[str, Any] = {**before, "algorithm": {"lam": {"actor": {"number": 1.0}, "critic": 1.0}}}
    lambdas = ("algorithm.lam.actor.number: 0.9 -> 1.0", "algorithm.lam.critic: 0.9 -> 1.0")
    assert compare_settings(old_form, own_lambdas, (10, 10)) == Changes(lambdas, ())
    changes = compare_settings(before, now, (10, 20))
    assert changes.harmless == ("actor.optimizer.learning_rate: 0.001 -> 0.0001", "run.steps: 10 -> 20")
    assert changes.dangerous == ("reference.path: not set -> 'r'",)
    now["actor"] = {"optimizer": {"schedule": "linear", "learning_rate": 1e-3}}
    changes = compare_settings(before, now, (10, 20))
    assert changes.harmless == ("actor.optimizer.schedule: 'constant' -> 'linear'",)
    assert "run.steps: 10 -> 20 (learning rates decay over the run's steps)" in changes.dangerous
    waits: list[dict[str, Any]] = [{**now, "critic": {"warmup_steps": steps}} for steps in (5, 0)]
    sentence = "critic.warmup_steps: 5 -> 0"
    moved = f"{sentence} (the actor's learning rate decays over the steps after it)"
    assert compare_settings(waits[0], waits[1], (10, 10)) == Changes((), (moved,))
    steady: list[dict[str, Any]] = [{"critic": wait["critic"]} for wait in waits]
    assert compare_settings(steady[0], steady[1], (10, 10)) == Changes((sentence,), ())
    unmentioned = {"rollout": {"servers": {"threads": 2, "request_timeout_seconds": 1800.0}}}
    planned = {"rollout": {"servers": {"threads": 2, "request_timeout_seconds": 4000.0}}}  # planned by a slower machine
    assert compare_settings(unmentioned, planned, (10, 10)).harmless == ()
    resting = {"actor": {"offload": {"weights": True}}, "reference": {"offload": {"weights": True}}}
    staying = {"actor": {"offload": {"weights": False}}, "reference": {"offload": {"weights": False}}}
    assert compare_settings(resting, staying, (10, 10)) == Changes((), ())
    now["run"] = {"seed": 1, "steps": None, "epochs": 2}
    assert compare_settings(before, now, (10, 10)).harmless[1:] == ("run.epochs: not set -> 2", "run.steps: 10 -> null")
    message = "run.epochs: not set -> 2 (learning rates decay over the run's steps)"
    assert message in compare_settings(before, now, (10, 20)).dangerous


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


def saved_at(step_minutes: list[float], every_minutes: float | None) -> list[float]:
    """Return the minutes at which a run with steps of these lengths writes checkpoints. Writing takes no time."""
    clock, now, times = Clock(every_minutes, 0.0), 0.0, []
    for minutes in step_minutes:
        now += 60 * minutes
        if clock.is_late(now):
            clock.restart(now)
            times.append(now / 60)
    return times


@pytest.mark.parametrize("minutes", [1.0, 7.0, 25.0, 29.0, 31.0, 50.0])
def test_loss_of_a_killed_run_is_bounded(minutes: float) -> None:
    """The checkpoint is written before the step that would exceed the bound."""
    times = saved_at([minutes] * 200, 60.0)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert max(gaps) <= 60.0
    assert min(gaps) > 60.0 - 2 * minutes, "checkpoints are too frequent"
    assert 200 * minutes - times[-1] <= 60.0


def test_steps_of_changing_length() -> None:
    times = saved_at([5.0, 10.0, 20.0, 20.0, 45.0, 45.0, 5.0], 60.0)
    assert times == [55.0, 100.0, 145.0]


def test_interval_has_a_default_and_can_be_disabled() -> None:
    assert CheckpointSettings().every_minutes == 60.0
    assert saved_at([50.0] * 20, None) == []


def stopped_at(step_minutes: list[float], end_minutes: float | None, writing_minutes: float = 0.0) -> float | None:
    """Return the minute at which a run with these steps stops, or None if the run completes. The start takes five
    minutes."""
    deadline, now = Deadline(None if end_minutes is None else 60 * end_minutes, 0.0), 60 * 5.0
    deadline.start(now)
    deadline.wrote(60 * writing_minutes)
    for minutes in step_minutes:
        now += 60 * minutes
        if deadline.is_near(now):
            return now / 60
    return None


@pytest.mark.parametrize(
    ("steps", "writing", "stops"),
    [
        ([10.0] * 20, 0.0, 115.0),  # the next step would take 12 minutes with slack, and stopping at least one
        ([10.0] * 20, 3.0, 105.0),  # twice the time of a checkpoint
        ([10.0, 40.0, *[10.0] * 10], 0.0, 75.0),  # the longest of the last ten counts
        ([20.0, *[1.0] * 99], 0.0, 118.0),  # the longest step is no longer among the last ten
        ([200.0], 0.0, 205.0),  # the stop is late, but has a checkpoint
        ([10.0] * 10, 0.0, None),
    ],
)
def test_run_stops_before_its_deadline(steps: list[float], writing: float, stops: float | None) -> None:
    assert stopped_at(steps, 120.0, writing) == stops
    assert stopped_at(steps, None, writing) is None
