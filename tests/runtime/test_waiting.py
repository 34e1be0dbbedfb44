"""Common functions: waits with a deadline, ports, and messages of a process."""

from __future__ import annotations

import io
import socket
import threading
import time

import pytest

from megappo.errors import first_of, nearest_word, reason
from megappo.observe.messages import Messages, View
from megappo.runtime.store import free_port, listening_problem
from megappo.runtime.waiting import wait_until


def test_wait_ends_with_condition_or_timeout() -> None:
    seen: list[int] = []

    def third() -> bool:
        seen.append(1)
        return len(seen) == 3

    assert wait_until(third, 60.0, every_seconds=0.001) and len(seen) == 3
    start = time.monotonic()
    assert not wait_until(lambda: False, 0.05, every_seconds=0.01)
    assert 0.05 <= time.monotonic() - start < 5.0
    assert wait_until(lambda: True, 0.0, every_seconds=60.0)  # no wait if the condition is already true


@pytest.mark.waits
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_free_port_can_be_used_once(host: str) -> None:
    port = free_port(host)
    assert port < 30000  # the system assigns higher ports automatically
    assert listening_problem(host, port) is None
    with socket.socket() as taken:
        taken.bind((host, port))
        taken.listen()
        assert listening_problem(host, port) == "Address already in use"


@pytest.mark.waits
def test_listening_on_a_foreign_address_fails() -> None:
    assert (
        listening_problem("192.0.2.1", 0) == "Cannot assign requested address"
    )  # an address that is reserved for documentation
    assert listening_problem("no.such.host.invalid", 0)
    with pytest.raises(OSError, match="Cannot assign requested address"):
        free_port("192.0.2.1")


class Drawn(View):
    """View that records its messages."""

    def __init__(self, close_seconds: float = 0.0) -> None:
        super().__init__(io.StringIO())
        self.lines: list[str] = []
        self._close_seconds = close_seconds

    def message(self, text: str) -> None:
        self.lines.append(text)

    def close(self) -> None:
        threading.Event().wait(self._close_seconds)
        self.lines.append("closed")


def test_messages_are_shown_in_the_view(capsys: pytest.CaptureFixture[str]) -> None:
    messages, view = Messages(), Drawn()
    messages.show("before")
    messages.show_in(view)
    messages.show("meanwhile")
    assert capsys.readouterr().err == "megappo: before\n"
    assert view.lines == ["meanwhile"]
    messages.show_in(None)
    messages.show("after")
    assert (capsys.readouterr().err, view.lines) == ("megappo: after\n", ["meanwhile"])


@pytest.mark.parametrize("close_seconds", [0.0, 60.0])
def test_last_message_closes_the_view_with_a_timeout(close_seconds: float, capsys: pytest.CaptureFixture[str]) -> None:
    messages, view = Messages(), Drawn(close_seconds)
    messages.show_in(view)
    start = time.monotonic()
    messages.show_last("the end")
    assert time.monotonic() - start < 20
    assert view.lines == ([] if close_seconds else ["closed"])
    assert capsys.readouterr().err == "megappo: the end\n"


def test_helpers_for_messages() -> None:
    assert (
        first_of(["a", "b"], 2) == "a, b" and first_of("abcd", 2, "; ") == "a; b and 2 more" and first_of([], 3) == ""
    )
    assert nearest_word("MYENGIN", ["MyEngine", "Other"]) == "MyEngine"
    assert nearest_word("zzz", ["abc"], cutoff=0.5) is None
    assert reason(OSError("two\nlines \x1b[31m")) == "two lines \\x1b[31m"
    assert (reason(KeyError()), reason(ValueError("x" * 400), 10)) == ("KeyError", "xxxxxxx...")
