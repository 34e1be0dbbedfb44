"""Reward servers that say anything at all, and proxies of the environment: what each costs, and who is asked."""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

import numpy as np
import pytest

from megappo.config import load_config
from megappo.config.schema import RewardSettings
from megappo.doctor.judges import judge_findings
from megappo.environments.gateway.server import AgentEndpoint
from megappo.network import http_client
from megappo.rewards.http import Unscored, post, scores
from megappo.rewards.workers import RewardPool, RewardRequest
from tests.support.places import BASE
from tests.support.rewards import serving

pytestmark = pytest.mark.waits

DEAD = "http://127.0.0.1:9"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


def whole(body: bytes) -> bytes:
    return HEAD % len(body) + body


CUT = {
    "in its middle": whole(b'{"score": 0.'),
    "in a text": whole(b'{"score": 1, "why": "as I sa'),
    "in a letter": whole('{"score": 1, "why": "ü'.encode()[:-1]),
    "of what was promised": HEAD % 99 + b'{"score": 1}',
    "in a chunk": b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n{"score": 1}',
    "before its head ends": b"HTTP/1.1 200 OK\r\nContent-Le",
    "before all": b"",
}
REFUSED = {
    "deep": (whole(b'{"score": ' + b"[" * 100_000), "nested too deeply"),
    "deep and whole": (whole(b'{"score": ' + b"[" * 900 + b"]" * 900 + b"}"), "must have a number as score"),
    "digits": (whole(b'{"score": ' + b"1" * 5000 + b"}"), "digits"),
    "no head": (b"I am no HTTP server\r\n\r\n", "I am no HTTP server"),
    "long head": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "header line"),
    "page": (whole(b"<html>Sign in</html>"), "not JSON: <html>"),
    "terminal": (whole(b"\x1b[31m"), r"not JSON: \x1b[31m"),
    "moved": (
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
        "HTTP 302 Found to http://127.0.0.1:9/, which is not followed",
    ),
    "endless": (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (16 * 10**6 + 1), "more than 16000000 bytes"),
    "dripping": (b"HTTP/1.1 200 OK\r\n\r\n", "timed out"),
    "dripping head": (b"HTTP/1.1 200 OK\r\n", "timed out"),
}


@contextmanager
def server_answering(answer: Callable[[str], bytes]) -> Iterator[str]:
    """A server that answers a sample by its response, byte for byte; where that begins with `dripping` it says a letter
    now and then for ever."""
    listening, ended = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection:
            given = connection.recv(1 << 20)
            while b"\r\n\r\n" not in given or not given.endswith(b"}"):
                given += connection.recv(1 << 20)
            response = json.loads(given.partition(b"\r\n\r\n")[2])["response"]
            try:
                connection.sendall(answer(response))
                while response.startswith("dripping") and not ended.wait(0.1):
                    connection.sendall(b"x")
            except OSError:
                return

    def listen() -> None:
        while not ended.is_set():
            connection, _ = listening.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/score"
    finally:
        ended.set()
        socket.create_connection(listening.getsockname()).close()
        thread.join()
        listening.close()


def score(url: str, *responses: str, **options: Any) -> list[float | str]:
    one: dict[str, Any] = {"prompts": "p", "answers": "a", "metadata": {}, "conversations": [], "truncated": False}
    many = {name: [value] * len(responses) for name, value in one.items()}
    return scores(url=url, responses=responses, **{"deadline_seconds": 3.0, **many, **options})


def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    asked: list[str] = []

    def answer(response: str) -> bytes:
        asked.append(response)
        return whole(b'{"score": 1}') if asked.count(response) > 2 else CUT[response]

    with server_answering(answer) as url:
        assert score(url, *CUT) == [1.0] * len(CUT)
    assert {response: asked.count(response) for response in CUT} == dict.fromkeys(CUT, 3)


def test_a_server_says_when_it_may_be_asked_again() -> None:
    """Not sooner; where that is behind the deadline, not at all."""
    asked: list[float] = []

    def busy(response: str) -> bytes:
        asked.append(time.monotonic())
        if len(asked) == 2:
            return whole(b'{"score": 1}')
        return f"HTTP/1.1 503 Busy\r\nRetry-After: {response}\r\nContent-Length: 0\r\n\r\n".encode()

    with server_answering(busy) as url:
        assert score(url, "1") == [1.0] and asked[1] - asked[0] >= 1.0
        (found,) = score(url, "60")
        assert "HTTP 503 Busy, after 1 try" in str(found)


def test_what_a_server_said_is_told_where_the_last_try_has_no_answer() -> None:
    said = [b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"]
    with server_answering(lambda _: said.pop(0)) as url:
        (found,) = score(url, "dripping", deadline_seconds=1.0)
    assert "HTTP 503 Busy, then timed out, after 2 tries" in str(found)


def test_whatever_a_server_says_costs_its_own_sample() -> None:
    """In the time that a sample has, which no answer stretches; and so in a reward worker."""
    said = {name: answer for name, (answer, _) in REFUSED.items()} | CUT

    def answer(response: str) -> bytes:
        return said.get(response, whole(b'{"score": 0.5}'))

    everything = ["fine", *said, "fine"]
    with server_answering(answer) as url:
        start = time.monotonic()
        found = score(url, *everything, deadline_seconds=1.5)
        assert time.monotonic() - start < 8
        assert found[0] == found[-1] == 0.5 and all(isinstance(f, Unscored) for f in found[1:-1]), found
        told = dict(zip(everything, map(str, found), strict=True))
        for name, (_, words) in REFUSED.items():
            assert words in told[name], (name, told[name])
        settings = RewardSettings(
            function="megappo.rewards.http:scores", batch=True, options={"url": url, "deadline_seconds": 1.5},
            max_failure_fraction=1.0, failure_score=-1.0, timeout_seconds=20,
        )  # fmt: skip
        with RewardPool(settings) as pool:
            result = pool.score([RewardRequest("p", response, response, None, {}) for response in everything])
        assert result.scores.tolist() == [0.5, *[-1.0] * len(said), 0.5]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (datetime.date(2026, 1, 2), "metadata.x is datetime.date(2026, 1, 2) (date), which JSON does not support"),
        (Decimal("0.5"), "metadata.x is Decimal('0.5') (Decimal)"),
        ({"y": [1.0, float("nan")]}, "metadata.x.y[1] is nan (float)"),
        (float("-inf"), "metadata.x is -inf (float)"),
        (np.int64(3), "metadata.x is np.int64(3) (int64)"),
        ({(1, 2): 3}, "a key of metadata.x is (1, 2) (tuple)"),
        (b"a", "metadata.x is b'a' (bytes)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_without_json_names_its_field(value: Any, words: str) -> None:
    """Only the sample with the value fails."""
    with server_answering(lambda _: whole(b'{"score": 1}')) as url:
        good, failed = score(url, "a", "b", metadata=[{}, {"x": value}])
    assert good == 1.0 and isinstance(failed, Unscored) and words in failed


def test_deeply_nested_metadata_fails_only_its_own_sample() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with server_answering(lambda _: whole(b'{"score": 1}')) as url:
        good, failed = score(url, "a", "b", metadata=[{}, {"x": deep}])
    assert good == 1.0 and "RecursionError" in str(failed)


@pytest.mark.parametrize("status", ["400 Bad Request", "401 Unauthorized", "404 Not Found", "422 Unprocessable"])
def test_the_reason_of_a_refusal_is_reported(status: str) -> None:
    """The first 200 characters of the body are reported as a single line without keys."""
    bodies = {
        "json": json.dumps({"detail": "field 'answer' is required"}),
        "long": "x" * 199 + "yz" * 5000,
        "lines": "model 'm'\n\n  is not served\x1b[31m",
        "key": "the key sk-abcdefghijklmnop1234567890 is wrong",
        "none": "",
    }

    def answer(response: str) -> bytes:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(bodies[response])}\r\n\r\n"
        return (head + bodies[response]).encode()

    with server_answering(answer) as url:
        reasons = dict(zip(bodies, map(str, score(url, *bodies)), strict=True))
    start = f"{url}: HTTP {status}"
    assert reasons == {
        "json": f"{start}: {bodies['json']}",
        "long": f"{start}: {'x' * 197}...",
        "lines": f"{start}: model 'm' is not served\\x1b[31m",
        "key": f"{start}: the key (hidden) is wrong",
        "none": start,
    }


def test_the_reason_of_a_temporary_refusal_is_reported() -> None:
    """Where the server asks for a pause that ends after the deadline."""
    body = b'{"error": "quota of team a is used up"}'
    head = b"HTTP/1.1 429 Busy\r\nRetry-After: 60\r\nContent-Length: %d\r\n\r\n" % len(body)
    with server_answering(lambda _: head + body) as url:
        (reason,) = score(url, "r")
    assert str(reason) == f"{url}: HTTP 429 Busy: {body.decode()}, after 1 try"


@pytest.mark.parametrize(
    ("answer", "requests", "words"),
    [
        ({"error": {"message": "overloaded"}}, 2, ""),
        ({"error": "busy"}, 2, ""),
        ({"error": {"message": "later", "code": 503}}, 2, ""),
        ({"object": "error", "message": "later", "code": "server_error"}, 2, ""),
        ({"error": {"message": "no such model", "code": 404}}, 1, "answered with error 404: no such model"),
        ({"object": "error", "message": "bad field", "code": 400}, 1, "answered with error 400: bad field"),
        ({"error": None}, 1, 'answered {"error": null}, must have a number as score'),
    ],
)
def test_an_error_in_an_answer_of_status_200_is_retried(answer: Any, requests: int, words: str) -> None:
    """Errors with a code such as 400 are not retried."""
    answers = [json.dumps(answer).encode(), b'{"score": 0.5}']
    with server_answering(lambda _: whole(answers.pop(0))) as url:
        (result,) = score(url, "r")
    assert 2 - len(answers) == requests
    assert words in str(result) if words else result == 0.5


def test_a_score_with_an_error_counts() -> None:
    with server_answering(lambda _: whole(b'{"score": 0.0, "error": "does not compile"}')) as url:
        assert score(url, "r") == [0.0]


# Proxies of the environment


class Proxy(BaseHTTPRequestHandler):
    """Answers whatever it is asked for itself."""

    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.asked.append(self.path)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(503 if "busy" in self.path else 200)
        self.end_headers()
        self.wfile.write(b'{"score": 0.25, "choices": [{"message": {"content": "good"}}]}')

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}')

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, DEAD)
        monkeypatch.setenv(name.upper(), DEAD)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("dead_proxy")
def test_servers_of_the_job_are_asked_without_a_proxy() -> None:
    """A reward server and a judge, from their workers, and the doctor."""
    judge = {"model": "m", "prompt": "{answer}", "choices": {"good": 1.0, "bad": 0.0}, "timeout_seconds": 2.0}
    with serving(Proxy) as url:
        chosen: list[dict[str, Any]] = [
            {
                "function": "megappo.rewards.http:scores",
                "batch": True,
                "options": {"url": url, "deadline_seconds": 2.0},
            },
            {"judge": {"url": f"{url}/v1", **judge}},
        ]
        for settings, score_ in zip(chosen, (0.25, 1.0), strict=True):
            (given,) = (term for _, term in RewardSettings.model_validate(settings).terms.values())
            with RewardPool(given) as pool:
                assert pool.score([RewardRequest("p", "r", "r", None, {})]).scores.tolist() == [score_]
        config = load_config(BASE, [f"reward={json.dumps({'judge': {'url': f'{url}/v1', **judge}})}"])
        assert [finding.state for finding in judge_findings(config)] == ["fine"]


def test_a_server_outside_is_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which an error names, without its password; a server of the run's own is reached directly wherever it is."""
    Proxy.asked.clear()
    with serving(Proxy) as url:
        monkeypatch.setenv("http_proxy", url.replace("//", "//me:secret@"))
        monkeypatch.delenv("no_proxy", raising=False)
        outside = "http://judge.example.invalid/score"
        assert score(outside, "r") == [0.25] and Proxy.asked == [outside]
        with pytest.raises(OSError, match=r"busy through the environment's proxy 127.0.0.1:\d+: HTTP 503"):
            post("http://judge.example.invalid/busy", {}, str, headers={}, deadline_seconds=60.0, most_tries=1)
        with pytest.raises(OSError, match="not known"):  # no proxy was asked, which would have answered
            http_client.fetch(urllib.request.Request(outside), timeout_seconds=2.0, own=True)


@pytest.mark.parametrize(
    ("host", "near"),
    [
        *[(host, True) for host in ("127.0.0.1", "10.1.2.3", "192.168.0.7", "169.254.1.1", "100.64.0.9", "[::1]")],
        *[(host, True) for host in ("[fd00::7]", "localhost", "judge", "node17")],
        *[(host, False) for host in ("8.8.8.8", "[2001:4860:4860::8888]", "judge.example.invalid")],
    ],
)
@pytest.mark.usefixtures("dead_proxy")
def test_what_is_near(host: str, near: bool) -> None:
    for scheme in ("http", "https"):
        assert http_client.proxy_of(f"{scheme}://{host}:30000/v1") == (None if near else "127.0.0.1:9")


@pytest.mark.parametrize(("held", "wanted"), [("", "localhost,127.0.0.1,::1,10.0.0.7"), ("*", "*"), ("a.b", "a.b,loc")])
def test_an_agent_reaches_the_model_without_a_proxy(held: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", held)
    endpoint = AgentEndpoint("http://10.0.0.7:1/v1", "http://10.0.0.7:1", "k")
    assert endpoint.environment["no_proxy"] == endpoint.environment["NO_PROXY"]
    assert endpoint.environment["no_proxy"].startswith(wanted)
    code = "import urllib.request; print(bool(urllib.request.proxy_bypass('10.0.0.7:1')))"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | endpoint.environment, capture_output=True)
    assert done.stdout == b"True\n"
