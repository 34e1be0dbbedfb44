"""Exposure of a run to other users: files, command lines and listening sockets."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import psutil
import pytest

from tests.support.harness import start
from tests.support.rewards import serving
from tests.support.worlds import environment

pytestmark = [pytest.mark.slow, pytest.mark.waits]

TOKEN = "a-t0ken-of-the-tests"


class Attempt(NamedTuple):
    """A run that started with a token."""

    token: str
    printed: str
    keys: set[str]
    """Credentials in the requests to the reward server."""
    processes: dict[str, set[str]]
    """Command lines of all processes of this machine during the first request, with the listening addresses of the
    processes of the run."""


class Answers(BaseHTTPRequestHandler):
    """A reward server that returns the received credentials instead of the score of every fourth sample."""

    credentials: ClassVar[list[str]] = []
    seen: ClassVar[dict[str, set[str]]] = {}

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if not self.credentials:
            self.seen.update(processes(self.client_address[1]))
        self.credentials.append(credential := str(self.headers["Authorization"]) + str(self.headers["X-Key"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": credential if len(self.credentials) % 4 == 0 else 0.5}).encode())

    def log_message(self, *_: Any) -> None:
        pass


def processes(port: int) -> dict[str, set[str]]:
    """Return the processes as in `Attempt`. `port` is the port of a connection from the run; the ranks are children
    of the session leader."""
    addresses: dict[str, set[str]] = {}
    (worker,) = (c.pid for c in psutil.net_connections() if c.pid and c.laddr.port == port and c.raddr)
    job = next(p for p in psutil.Process(worker).parents() if os.getsid(p.pid) == p.pid)
    of_run = {p.pid for p in job.children(recursive=True)}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            ours = process.net_connections() if process.pid in of_run else []
            addresses.setdefault(line, set()).update(c.laddr.ip for c in ours if c.status == psutil.CONN_LISTEN)
    return addresses


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doors") / "run"


@pytest.fixture(scope="module")
def attempts(run: Path) -> list[Attempt]:
    """Run two ranks with the gateway of an agent and reward workers, stop the run, and continue with another token."""
    pytest.importorskip("openai", reason="OpenAI's SDK is not installed; it comes with SGLang")
    results = []
    for token, steps in ((TOKEN, 1), (TOKEN[::-1], 2)):
        Answers.credentials.clear()
        Answers.seen.clear()
        with serving(Answers) as url:
            options = {"url": url, "key": "REWARD_KEY", "headers_from_environment": {"X-Key": "REWARD_KEY"}}
            reward = {"function": "megappo.rewards.http:scores", "batch": True, "options": options}
            done = start(
                "megappo", "train", "configs/examples/11_agent/agent.yaml", f"run.directory={run}",
                f"run.steps={steps}",
                "checkpoint={every_steps: 1}",
                "actor.optimizer.schedule=constant", f"reward={json.dumps(reward)}",
                processes=2, environment=environment(REWARD_KEY=token),
            )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        results.append(Attempt(token, done.stdout + done.stderr, set(Answers.credentials), dict(Answers.seen)))
    return results


def test_run_never_exposes_a_token(run: Path, attempts: list[Attempt]) -> None:
    """Files, output and command lines contain no token. The run continues with a different token."""
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"config.yaml", "checkpoint.json", "samples.jsonl"} <= {path.name for path in files}
    for token, printed, keys, seen in attempts:
        assert keys == {f"Bearer {token}{token}"}
        assert "the first reward that failed" in printed and "(hidden)" in printed and token not in printed
        assert not any(token in line for line in seen)
        assert not [path for path in files if token.encode() in path.read_bytes()]


def test_run_on_one_machine_listens_on_loopback(attempts: list[Attempt]) -> None:
    """Ranks with gloo, the store and the gateway listen on loopback. Reward workers do not listen."""
    for attempt in attempts:
        addresses = {
            line: addresses_of_line for line, addresses_of_line in attempt.processes.items() if addresses_of_line
        }
        assert set().union(*addresses.values()) == {"127.0.0.1"}, addresses
        assert not any("worker_main" in line for line in addresses)
