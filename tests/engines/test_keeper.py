"""One server is kept running: started again when it dies, given up when that does not help, and stopped in the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megappo.engines.sglang.client import ServerFailure
from megappo.engines.sglang.keeper import keep_running
from megappo.errors import RunError


class Signal:
    """Does not sleep; is due when a server says so."""

    due = False

    def wait(self, seconds: float) -> bool:
        return self.due


class Mortal:
    """A server that is ready at once, or never, and is asked whether it runs so many times until it dies; one that
    never dies has the signal given instead."""

    key, log, why_ended = "judge", "a file", "killed"

    def __init__(self, lives: int | None, signal: Signal, *, is_sound: bool = True, most: int = 2) -> None:
        self._lives, self._signal, self._is_sound = lives, signal, is_sound
        self.settings = SimpleNamespace(max_restarts=most)
        self.endpoint = SimpleNamespace(name="server 0")
        self.told = list[str]()
        self.stops = self.asked = 0

    def is_ready(self) -> bool:
        if not self._is_sound:
            raise ServerFailure("server 0 died while it loaded")
        return True

    @property
    def running(self) -> bool:
        self.asked += 1
        self._signal.due = self._lives is None and self.asked == 3
        return self._lives is None or self.asked <= self._lives

    def tell_parts(self, sentence: str) -> None:
        self.told.append(sentence)

    def stop(self) -> None:
        self.stops += 1


def kept(*servers: Any, signal: Signal) -> list[int]:
    """The numbers with which these servers are started, one after the other."""
    numbers = list[int]()

    def start(number: int) -> Any:
        numbers.append(number)
        return servers[number]

    keep_running(start, signal, patience_seconds=60.0)
    return numbers


def test_a_server_that_dies_is_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    signal = Signal()
    servers = [Mortal(2, signal), Mortal(0, signal), Mortal(None, signal)]
    assert kept(*servers, signal=signal) == [0, 1, 2]
    assert [(server.asked, server.stops) for server in servers] == [(3, 1), (1, 1), (3, 1)]
    assert [server.told for server in servers] == [["ended: server 0 died; killed"]] * 2 + [[]]
    assert capsys.readouterr().err.count("server 0 died; killed; it is started again") == 2


@pytest.mark.parametrize(("most", "is_sound", "starts"), [(0, True, 1), (2, True, 3), (9, False, 2)])
def test_one_that_does_not_stay_is_given_up(most: int, is_sound: bool, starts: int) -> None:
    """Sooner where it never becomes ready."""
    signal = Signal()
    servers = [Mortal(1, signal, is_sound=is_sound, most=most) for _ in range(starts)]
    with pytest.raises(RunError, match=rf"; the server was started {starts} times \(judge.max_restarts {most}\)"):
        kept(*servers, signal=signal)
    assert [server.stops for server in servers] == [1] * starts


def test_a_start_that_was_told_to_stop_ends_it() -> None:
    assert kept(None, signal=Signal()) == [0]
