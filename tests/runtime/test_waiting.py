"""Common functions: waits with a deadline, retries of requests, seeds, ports, and messages of a process."""

from __future__ import annotations

import io
import math
import socket
import threading
import time
from email.message import Message

import pytest

from megappo.errors import first_of, nearest_word, reason
from megappo.network.retrying import LONGEST_PAUSE_SECONDS, Tries, requested_pause
from megappo.network.store import free_port, listening_problem
from megappo.observe.terminal.messages import Messages, View
from megappo.runtime.seeds import derived_seed
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


def test_pauses_double_and_vary() -> None:
    pauses = [Tries(math.inf).pause() or 0.0 for _ in range(64)]
    assert all(0.05 <= seconds <= 0.1 for seconds in pauses) and len(set(pauses)) > 1
    tries = Tries(math.inf)
    for longest in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *[LONGEST_PAUSE_SECONDS] * 3):
        seconds = tries.pause()
        assert seconds is not None and longest / 2 <= seconds <= longest
    tries.begin_again(math.inf)
    assert tries.count == 0 and (tries.pause() or 1.0) <= 0.1


def test_retries_end_by_number_and_deadline() -> None:
    tries = Tries(math.inf, most=2)
    assert tries.pause() is not None and tries.pause() is None and tries.count == 2
    assert Tries(0.01).pause() is None, "the next attempt would be after the deadline"
    assert Tries(30).pause(29.5) == 29.5 and Tries(30).pause(31) is None, "the server requests the pause"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0.0), ({"retry-after": "7"}, 7.0), ({"Retry-After": "-7"}, 0.0), ({"Retry-After": "soon"}, 0.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:30 GMT", "Date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 30.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:27:30 GMT", "Date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:30 GMT"}, 0.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:30", "Date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0.0),
    ],
)  # fmt: skip
def test_pause_requested_by_a_server(headers: dict[str, str], seconds: float) -> None:
    message = Message()
    for name, value in headers.items():
        message[name] = value
    assert requested_pause(message) == seconds and requested_pause(None) == 0.0


@pytest.mark.parametrize(
    ("parts", "bits", "seed"),
    [((0, 1, 2), 63, 3662037204992188296), ((7, "after", 12), 63, 2742713444620671204), ((3, 1), 32, 2276220904)],
)
def test_seeds_do_not_change(parts: tuple[int | str, ...], bits: int, seed: int) -> None:
    assert derived_seed(*parts, bits=bits) == seed


def test_seeds_use_all_bits_and_differ() -> None:
    for bits in (32, 63):
        seeds = {derived_seed(0, step, sample, bits=bits) for step in range(100) for sample in range(100)}
        assert len(seeds) > 9990 and 2**bits * 0.999 < max(seeds) < 2**bits
