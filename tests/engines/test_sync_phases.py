"""The phases of a weight sync are summed over all attempts. The next sync starts at 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megappo.config.sections.engine import ServerSettings
from megappo.engines.sglang.client import Endpoint
from megappo.engines.sglang.engine import SGLangEngine, SyncError
from megappo.engines.sglang.weights import sync
from megappo.runtime.watch.deadlines import Deadlines

pytestmark = pytest.mark.usefixtures("world_of_one")


class Clock:
    """A clock that the phases advance."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Failing(SGLangEngine):
    """An engine whose only server fails in the first attempts of a sync. Each attempt gathers for 2 s and loads for
    1 s."""

    failures, clock = 0, Clock()

    def _revive(self) -> None:
        self.clock.now += 0.25
        self._endpoints = [Endpoint(0, "", "", 0)]

    def _renew(self, stale: Sequence[Endpoint]) -> dict[int, str]:
        for phase, seconds in (("gather", 2.0), ("load", 1.0)):
            with self.timed(phase):
                self.clock.now += seconds
        self.failures -= 1
        return {0: "it died"} if self.failures >= 0 else {}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failing]:
    monkeypatch.setattr(sync, "time", Failing.clock)
    spec = SimpleNamespace(returns_routing=False, memory_saver=False)
    fleet: Any = SimpleNamespace(spec=spec, close=lambda: None)
    runtime: Any = SimpleNamespace(rank=0, is_main=False, deadlines=Deadlines(600.0, 600.0, {}))
    made = Failing(fleet, ServerSettings(sync_attempts=3), runtime)
    yield made
    made.close()


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_phases_include_all_attempts(engine: Failing, failures: int) -> None:
    weights: Any = None
    for version in (1, 2):  # the second sync starts at 0
        engine.failures = failures
        report = engine.update_weights(weights, version)
        attempts = failures + 1
        expected = {"gather": 2.0 * attempts, "load": 1.0 * attempts, "wake": 0.25 * attempts}
        assert report.phases() == {"verify": 0.0, "session": 0.0, **expected}
        assert report.transfer_seconds == 3.0, "the transfer is that of the last attempt"


def test_phases_of_a_failed_sync(engine: Failing) -> None:
    engine.failures, started = 9, engine.clock.now
    weights: Any = None
    with pytest.raises(SyncError, match="weight sync 1 failed 3 times: it died"):
        engine.update_weights(weights, 1)
    assert engine.clock.now - started == pytest.approx(3 * 3.25), "each attempt gathers and loads once"
