"""Tests of the supervision of a server: restarts, the limit of restarts, and the final stop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megappo.engines.sglang.client import ServerFailure
from megappo.engines.sglang.servers.keeper import keep_running
from megappo.errors import RunError


class Signal:
    """Does not sleep. A server sets `due`."""

    due = False

    def wait(self, seconds: float) -> bool:
        return self.due


class Mortal:
    """A server that is ready at once or never. After `lives` checks, the server dies. With `lives` null, the server
    sets the signal instead."""

    key, log, why_ended = "judge", "a file", "killed"

    def __init__(self, lives: int | None, signal: Signal, *, is_sound: bool = True, most: int = 2) -> None:
        self._lives, self._signal, self._is_sound = lives, signal, is_sound
        self.settings = SimpleNamespace(max_restarts=most)
        self.endpoint = SimpleNamespace(name="server 0")
        self.messages = list[str]()
        self.stops = self.checks = 0

    def is_ready(self) -> bool:
        if not self._is_sound:
            raise ServerFailure("server 0 died while it loaded")
        return True

    @property
    def running(self) -> bool:
        self.checks += 1
        self._signal.due = self._lives is None and self.checks == 3
        return self._lives is None or self.checks <= self._lives

    def notify_parts(self, sentence: str) -> None:
        self.messages.append(sentence)

    def stop(self) -> None:
        self.stops += 1


def start_numbers(*servers: Any, signal: Signal) -> list[int]:
    """Return the numbers of the starts when these servers run in sequence."""
    numbers = list[int]()

    def start(number: int) -> Any:
        numbers.append(number)
        return servers[number]

    keep_running(start, signal, patience_seconds=60.0)
    return numbers


def test_dead_server_is_restarted(capsys: pytest.CaptureFixture[str]) -> None:
    signal = Signal()
    servers = [Mortal(2, signal), Mortal(0, signal), Mortal(None, signal)]
    assert start_numbers(*servers, signal=signal) == [0, 1, 2]
    assert [(server.checks, server.stops) for server in servers] == [(3, 1), (1, 1), (3, 1)]
    assert [server.messages for server in servers] == [["ended: server 0 died; killed"]] * 2 + [[]]
    assert capsys.readouterr().err.count("server 0 died; killed; it is started again") == 2


@pytest.mark.parametrize(("most", "is_sound", "starts"), [(0, True, 1), (2, True, 3), (9, False, 2)])
def test_failing_server_ends_the_run_after_restarts(most: int, is_sound: bool, starts: int) -> None:
    """A server that never becomes ready is restarted only once."""
    signal = Signal()
    servers = [Mortal(1, signal, is_sound=is_sound, most=most) for _ in range(starts)]
    with pytest.raises(RunError, match=rf"; the server was started {starts} times \(judge.max_restarts {most}\)"):
        start_numbers(*servers, signal=signal)
    assert [server.stops for server in servers] == [1] * starts


def test_cancelled_start_ends_the_supervision() -> None:
    assert start_numbers(None, signal=Signal()) == [0]
