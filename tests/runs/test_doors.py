"""What a run shows of itself to others: its files, its command lines, its listening sockets."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import psutil
import pytest

from tests.examples.agent import write_chat
from tests.support.harness import start
from tests.support.rewards import serving
from tests.support.worlds import environment

pytestmark = [pytest.mark.slow, pytest.mark.waits]

TOKEN = "a-t0ken-of-the-tests"


class Attempt(NamedTuple):
    """A run that was given a token."""

    token: str
    printed: str
    keys: set[str]
    """What the reward server was sent."""
    processes: dict[str, set[str]]
    """While it was asked: command lines of this machine, and of the run's among them, the addresses that they listen
    on."""


class Answers(BaseHTTPRequestHandler):
    """A reward server that says what it was told, with which every fourth sample has no score."""

    asked: ClassVar[list[str]] = []
    seen: ClassVar[dict[str, set[str]]] = {}

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if not self.asked:
            self.seen.update(processes(self.client_address[1]))
        self.asked.append(given := str(self.headers["Authorization"]) + str(self.headers["X-Key"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": given if len(self.asked) % 4 == 0 else 0.5}).encode())

    def log_message(self, *_: Any) -> None:
        pass


def processes(port: int) -> dict[str, set[str]]:
    """See `Attempt`; `port`: of a connection of the run's, whose ranks are children of what leads their session."""
    found: dict[str, set[str]] = {}
    (worker,) = (c.pid for c in psutil.net_connections() if c.pid and c.laddr.port == port and c.raddr)
    job = next(p for p in psutil.Process(worker).parents() if os.getsid(p.pid) == p.pid)
    of_run = {p.pid for p in job.children(recursive=True)}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            ours = process.net_connections() if process.pid in of_run else []
            found.setdefault(line, set()).update(c.laddr.ip for c in ours if c.status == psutil.CONN_LISTEN)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doors") / "run"


@pytest.fixture(scope="module")
def attempts(run: Path) -> list[Attempt]:
    """Two ranks with an agent's gateway and reward workers, which are stopped and go on with another token."""
    pytest.importorskip("openai", reason="OpenAI's SDK is not installed; it comes with SGLang")
    write_chat("configs/models/tiny_arithmetic", str(run.parent / "chat"))
    found = []
    for token, steps in ((TOKEN, 1), (TOKEN[::-1], 2)):
        Answers.asked.clear()
        Answers.seen.clear()
        with serving(Answers) as url:
            options = {"url": url, "key": "REWARD_KEY", "headers_from_environment": {"X-Key": "REWARD_KEY"}}
            reward = {"function": "megappo.rewards.http:scores", "batch": True, "options": options}
            done = start(
                "megappo", "train", "tests/examples/agent.yaml", f"run.directory={run}", f"run.steps={steps}",
                f"model.tokenizer={run.parent / 'chat'}", "checkpoint={every_steps: 1}",
                "actor.optimizer.schedule=constant", f"reward={json.dumps(reward)}",
                processes=2, environment=environment(REWARD_KEY=token),
            )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        found.append(Attempt(token, done.stdout + done.stderr, set(Answers.asked), dict(Answers.seen)))
    return found


def test_no_file_of_a_run_holds_a_token(run: Path, attempts: list[Attempt]) -> None:
    """Nor what it prints, nor a command line; and with another token it is the same run."""
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"config.yaml", "checkpoint.json", "samples.jsonl"} <= {path.name for path in files}
    for token, printed, keys, seen in attempts:
        assert keys == {f"Bearer {token}{token}"}
        assert "the first reward that failed" in printed and "(hidden)" in printed and token not in printed
        assert not any(token in line for line in seen)
        assert not [path for path in files if token.encode() in path.read_bytes()]


def test_a_run_on_one_machine_listens_on_loopback(attempts: list[Attempt]) -> None:
    """Its ranks, with gloo, the store and the gateway, and its reward workers, which do not listen at all."""
    for attempt in attempts:
        addresses = {line: found for line, found in attempt.processes.items() if found}
        assert set().union(*addresses.values()) == {"127.0.0.1"}, addresses
        assert not any("worker_main" in line for line in addresses)
