"""Reward servers with arbitrary answers, and proxies of the environment: the cost of failures, and the addressed
hosts."""

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
from megappo.rewards.http import ScoreServer, Unscored, scores
from megappo.rewards.processes.workers import RewardPool, RewardRequest
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
    """Start a server that answers a sample with the exact bytes for its response. If the response begins with
    `dripping`, the server then sends single characters without end."""
    listening, ended = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection:
            received = connection.recv(1 << 20)
            while b"\r\n\r\n" not in received or not received.endswith(b"}"):
                received += connection.recv(1 << 20)
            response = json.loads(received.partition(b"\r\n\r\n")[2])["response"]
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


def test_incomplete_answers_are_retried() -> None:
    requested: list[str] = []

    def answer(response: str) -> bytes:
        requested.append(response)
        return whole(b'{"score": 1}') if requested.count(response) > 2 else CUT[response]

    with server_answering(answer) as url:
        assert score(url, *CUT) == [1.0] * len(CUT)
    assert {response: requested.count(response) for response in CUT} == dict.fromkeys(CUT, 3)


def test_server_sets_the_time_of_the_retry() -> None:
    """No retry is sent earlier. If the time is after the deadline, no retry is sent."""
    times: list[float] = []

    def busy(response: str) -> bytes:
        times.append(time.monotonic())
        if len(times) == 2:
            return whole(b'{"score": 1}')
        return f"HTTP/1.1 503 Busy\r\nRetry-After: {response}\r\nContent-Length: 0\r\n\r\n".encode()

    with server_answering(busy) as url:
        assert score(url, "1") == [1.0] and times[1] - times[0] >= 1.0
        (failure,) = score(url, "60")
        assert "HTTP 503 Busy, after 1 try" in str(failure)


def test_last_answer_is_reported_after_a_timeout() -> None:
    answers = [b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"]
    with server_answering(lambda _: answers.pop(0)) as url:
        (failure,) = score(url, "dripping", deadline_seconds=1.0)
    assert "HTTP 503 Busy, then timed out, after 2 tries" in str(failure)


def test_invalid_answers_cost_only_their_own_sample() -> None:
    """Each sample has a fixed time limit that no answer can extend. The same is true in a reward worker."""
    answers = {name: answer for name, (answer, _) in REFUSED.items()} | CUT

    def answer(response: str) -> bytes:
        return answers.get(response, whole(b'{"score": 0.5}'))

    everything = ["fine", *answers, "fine"]
    with server_answering(answer) as url:
        start = time.monotonic()
        results = score(url, *everything, deadline_seconds=1.5)
        assert time.monotonic() - start < 8
        assert results[0] == results[-1] == 0.5 and all(isinstance(f, Unscored) for f in results[1:-1]), results
        messages = dict(zip(everything, map(str, results), strict=True))
        for name, (_, expected) in REFUSED.items():
            assert expected in messages[name], (name, messages[name])
        settings = RewardSettings(
            function="megappo.rewards.http:scores", batch=True, options={"url": url, "deadline_seconds": 1.5},
            max_failure_fraction=1.0, failure_score=-1.0, timeout_seconds=20,
        )  # fmt: skip
        with RewardPool(settings) as pool:
            result = pool.score([RewardRequest("p", response, response, None, {}) for response in everything])
        assert result.scores.tolist() == [0.5, *[-1.0] * len(answers), 0.5]


@pytest.mark.parametrize(
    ("value", "message"),
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
def test_value_without_json_names_its_field(value: Any, message: str) -> None:
    """Only the sample with the value fails."""
    with server_answering(lambda _: whole(b'{"score": 1}')) as url:
        good, failed = score(url, "a", "b", metadata=[{}, {"x": value}])
    assert good == 1.0 and isinstance(failed, Unscored) and message in failed


def test_deeply_nested_metadata_fails_only_its_own_sample() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with server_answering(lambda _: whole(b'{"score": 1}')) as url:
        good, failed = score(url, "a", "b", metadata=[{}, {"x": deep}])
    assert good == 1.0 and "RecursionError" in str(failed)


@pytest.mark.parametrize("status", ["400 Bad Request", "401 Unauthorized", "404 Not Found", "422 Unprocessable"])
def test_reason_of_a_refusal_is_reported(status: str) -> None:
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


def test_reason_of_a_temporary_refusal_is_reported() -> None:
    """The server requests a pause that ends after the deadline."""
    body = b'{"error": "quota of team a is used up"}'
    head = b"HTTP/1.1 429 Busy\r\nRetry-After: 60\r\nContent-Length: %d\r\n\r\n" % len(body)
    with server_answering(lambda _: head + body) as url:
        (reason,) = score(url, "r")
    assert str(reason) == f"{url}: HTTP 429 Busy: {body.decode()}, after 1 try"


@pytest.mark.parametrize(
    ("answer", "requests", "message"),
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
def test_error_in_an_answer_of_status_200_is_retried(answer: Any, requests: int, message: str) -> None:
    """Errors with a code such as 400 are not retried."""
    answers = [json.dumps(answer).encode(), b'{"score": 0.5}']
    with server_answering(lambda _: whole(answers.pop(0))) as url:
        (result,) = score(url, "r")
    assert 2 - len(answers) == requests
    assert message in str(result) if message else result == 0.5


def test_score_with_an_error_counts() -> None:
    with server_answering(lambda _: whole(b'{"score": 0.0, "error": "does not compile"}')) as url:
        assert score(url, "r") == [0.0]


# Proxies of the environment


class Proxy(BaseHTTPRequestHandler):
    """A proxy that answers every request itself."""

    urls: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.urls.append(self.path)
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
def test_local_servers_are_reached_without_a_proxy() -> None:
    """Check a reward server and a judge from their workers, and the doctor."""
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
            (term_settings,) = (term for _, term in RewardSettings.model_validate(settings).terms.values())
            with RewardPool(term_settings) as pool:
                assert pool.score([RewardRequest("p", "r", "r", None, {})]).scores.tolist() == [score_]
        config = load_config(BASE, [f"reward={json.dumps({'judge': {'url': f'{url}/v1', **judge}})}"])
        assert [finding.state for finding in judge_findings(config)] == ["fine"]


def test_external_servers_are_reached_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors name the proxy without its password. Servers of the run are reached directly at any address."""
    Proxy.urls.clear()
    with serving(Proxy) as url:
        monkeypatch.setenv("http_proxy", url.replace("//", "//me:secret@"))
        monkeypatch.delenv("no_proxy", raising=False)
        outside = "http://judge.example.invalid/score"
        assert score(outside, "r") == [0.25] and Proxy.urls == [outside]
        with pytest.raises(OSError, match=r"busy through the environment's proxy 127.0.0.1:\d+: HTTP 503"):
            ScoreServer("http://judge.example.invalid", 60.0, 1, most_tries=1).post("/busy", {}, str)
        with pytest.raises(OSError, match="not known"):  # the proxy would have answered
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
def test_hosts_without_a_proxy(host: str, near: bool) -> None:
    for scheme in ("http", "https"):
        assert http_client.proxy_of(f"{scheme}://{host}:30000/v1") == (None if near else "127.0.0.1:9")


@pytest.mark.parametrize(
    ("value", "prefix"), [("", "localhost,127.0.0.1,::1,10.0.0.7"), ("*", "*"), ("a.b", "a.b,loc")]
)
def test_agent_reaches_the_model_without_a_proxy(value: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", value)
    endpoint = AgentEndpoint("http://10.0.0.7:1/v1", "http://10.0.0.7:1", "k")
    assert endpoint.environment["no_proxy"] == endpoint.environment["NO_PROXY"]
    assert endpoint.environment["no_proxy"].startswith(prefix)
    code = "import urllib.request; print(bool(urllib.request.proxy_bypass('10.0.0.7:1')))"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | endpoint.environment, capture_output=True)
    assert done.stdout == b"True\n"
