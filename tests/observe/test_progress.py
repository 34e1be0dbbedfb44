"""Progress of long stages: finished work, throughput and pending work."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.config import load_config
from megappo.megatron.roles import Update
from megappo.observe.terminal.console import LiveView, PlainView
from megappo.observe.terminal.progress import PROGRESS, SAMPLES, StageProgress, duration
from megappo.ppo import updates
from megappo.types import Samples
from tests.support.places import BASE


@pytest.fixture(autouse=True)
def reset_counts() -> Iterator[None]:
    """Reset the counts of the process after each test."""
    yield
    PROGRESS.expect(SAMPLES, 0)
    PROGRESS.enter("")


class Clock:
    """Clock that the test controls."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_line_contains_progress_and_pending_work() -> None:
    clock = Clock()
    progress = StageProgress(clock)
    assert progress.text() == "" and progress.seconds == 0
    progress.enter("rollout", "the 64 responses of all ranks")
    progress.add(SAMPLES, 3)  # no samples are expected
    progress.expect(SAMPLES, 32)
    clock.now += 125
    progress.add(SAMPLES, 8, tokens=150_000)
    progress.add(SAMPLES, 4, tokens=100_000)
    assert progress.text() == (
        "rollout for 2 min 5 s: 12 of 32 samples of this rank, 2,000 tokens/s, about 3 min 28 s left; "
        "waits for the 64 responses of all ranks"
    )
    progress.note_servers(3, 4)
    assert "about 3 min 28 s left, 3 of 4 servers busy; waits" in progress.text()
    progress.note_servers(0, 0)
    progress.enter("update_actor")  # the samples are generated ahead
    progress.expect("minibatches", 4)
    progress.add("minibatches", 1)
    assert progress.text().startswith(
        "update_actor for 0 s: 12 of 32 samples of this rank, 2,000 tokens/s, about 3 min 28 s left, 1 of 4 mini"
    )
    progress.note_servers(1, 4)
    progress.add("minibatches", 2)  # the last update was skipped
    progress.add(SAMPLES, 20)
    progress.enter("sync")
    assert progress.text() == "sync for 0 s"  # servers are reported only with samples
    progress.expect(SAMPLES, 32)
    progress.forget()  # the samples were abandoned
    progress.enter("checkpoint")
    assert progress.text() == "checkpoint for 0 s"
    progress.leave()
    assert progress.text() == "" and progress.seconds == 0


@pytest.mark.waits
def test_plain_view_prints_progress_at_intervals() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = StageProgress(clock)
    view = PlainView(stream, 9, progress, every_seconds=0.02, clock=lambda: 0.0)
    at = time.strftime("%H:%M:%S", time.localtime(0))

    def lines_after(seconds: float, expected: int) -> list[str]:
        clock.now += seconds
        deadline = time.monotonic() + 20
        while len(stream.getvalue().splitlines()) < expected and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # no further lines follow
        return stream.getvalue().splitlines()

    progress.enter("rollout", "the others")
    view.begin_step(3)
    view.stage("rollout")
    assert lines_after(0.01, 0) == []
    assert lines_after(0.02, 1) == [f"step 3: rollout for 0 s; waits for the others ({at})"]
    assert len(lines_after(0.02, 2)) == 2
    progress.enter("sync")
    view.stage("sync")
    assert len(lines_after(0.01, 2)) == 2
    assert lines_after(60, 3)[2] == f"step 3: sync for 1 min 0 s ({at})"
    view.close()
    assert len(lines_after(60, 3)) == 3


@pytest.mark.waits
def test_closed_plain_view_prints_no_progress() -> None:
    """This includes a line that was about to be printed."""
    started, stream = threading.Event(), io.StringIO()

    class Slow(StageProgress):
        def text(self) -> str:
            started.set()
            time.sleep(0.2)
            return super().text()

    clock = Clock()
    progress = Slow(clock)
    view = PlainView(stream, 9, progress, every_seconds=0.02)
    progress.enter("rollout")
    clock.now += 60
    view.stage("rollout")
    assert started.wait(20)
    view.close()
    output = stream.getvalue()
    time.sleep(0.4)
    assert stream.getvalue() == output


def test_default_interval_is_a_minute() -> None:
    defaults = {"every_seconds": 60.0, "clock": time.time, "right_above": {}}
    assert PlainView.__init__.__kwdefaults__ == defaults


def test_durations_have_two_units() -> None:
    values = (0.9, 59, 60, 3599, 3600, 86399, 90000, 10**6)
    texts = ["0 s", "59 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "23 h 59 min", "1 d 1 h", "11 d 13 h"]
    assert [duration(seconds) for seconds in values] == texts


@pytest.mark.waits
def test_live_view_shows_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    progress, stream = StageProgress(Clock()), io.StringIO()
    view = LiveView(stream, 3, progress)
    progress.enter("rollout", "the others")
    progress.expect(SAMPLES, 32)
    view.begin_step(1)
    progress.add(SAMPLES, 5)  # the view is not notified
    deadline = time.monotonic() + 20
    while "5 of 32 samples of this rank, about 0 s left; waits for the others" not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()[-2000:]
        time.sleep(0.05)
    view.close()


def test_updates_count_minibatches(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(BASE, ["actor.minibatch_sequences=4", "actor.epochs=2"])
    minibatches = updates.draw_minibatches(config.actor, 12, seed=1)
    assert [len(ids) for ids in minibatches] == [4, 4, 4] * 2
    assert frozenset.union(*minibatches[:3]) == frozenset.union(*minibatches[3:]) == set(range(12))
    seen: list[str] = []

    def update(number: int, task: object, **more: object) -> Update:
        seen.append(PROGRESS.text().split(": ")[1])
        return Update(True, True, {}, 1.0, 1e-3)

    samples = Samples(torch.arange(12), (torch.ones(5, dtype=torch.int64),) * 12, torch.full((12,), 3))
    batch: Any = SimpleNamespace(minibatches=minibatches, samples=samples, update=update)
    batch.with_fields, batch.role = (
        lambda fields: batch,
        SimpleNamespace(runtime=SimpleNamespace(device="cpu"), rest=lambda: None),
    )
    monkeypatch.setattr(updates, "all_gather_varying", lambda local: [local])
    fields = {"mask": torch.ones(12, 3, dtype=torch.bool)}
    PROGRESS.enter("update_actor")
    results = list(updates.RoleUpdates(batch, config, fields, partial(updates.ValueTask, None)).run())
    PROGRESS.leave()
    assert [len(done.chosen) for done in results] == [4, 4, 4] * 2
    assert [done.weights.tokens for done in results] == [12, 12, 12] * 2
    assert [text.partition(",")[0] for text in seen] == [f"{n} of 6 minibatches" for n in range(6)]
