"""What listens while a run with SGLang goes on, beside the table that says it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import urllib.error
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import psutil
import pytest

from tests.examples.agent import write_chat
from tests.support.harness import start
from tests.support.places import ROOT
from tests.support.rewards import serving
from tests.support.worlds import environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the full environment"),
]
HERE = "a run on one machine"
TABLE = {
    "an SGLang server": HERE,
    "the ranks of one server on one machine": HERE,
    "the stores at which parts and ranks of a server on several machines meet": "several machines",
    "sockets to the ranks of such a server with `data_parallel_attention` (SGLang's)": "data_parallel_attention",
    "a further part of such a server": "several machines",
    "the store of rank 0, and those of weight broadcasts": HERE,
    "torchrun under `launch/torchrun.sh` on one machine": HERE,
    "torchrun with `--nodes`, or with `MEGAPPO_LAUNCHER=torchrun`": "several machines",
    "a plain `torchrun`": "another launcher",
    "gloo": HERE,
    "NCCL": "GPUs",
    "an agent's endpoint (the gateway)": HERE,
    "reward workers and tools": HERE,
}
"""The rows of "What listens where", and in which run they are there."""
NOWHERE = ("worker_main", "tool_worker", "agent_worker", "resource_tracker")


class Listener(NamedTuple):
    """A socket that a process of the run listens at."""

    process: str
    address: str
    answer: str
    """To a request over HTTP with a wrong key: a status, or that it speaks something else."""


class Asked(BaseHTTPRequestHandler):
    """A reward server; at the first sample it looks at the run that asks."""

    found: ClassVar[list[Listener]] = []
    silent: ClassVar[set[str]] = set()
    """Processes of the run that listen nowhere."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if not self.found:
            self.found.extend(listeners(self.client_address[1], self.silent))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": 0.5}).encode())

    def log_message(self, *_: Any) -> None:
        pass


def listeners(port: int, silent: set[str]) -> list[Listener]:
    """Of the run that has a connection from this port."""
    (worker,) = (c.pid for c in psutil.net_connections() if c.pid and c.laddr.port == port and c.raddr)
    job = next(p for p in psutil.Process(worker).parents() if os.getsid(p.pid) == p.pid)
    found = []
    for process in job.children(recursive=True):
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            ours = [c.laddr for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
            found += [Listener(line, place.ip, _answer(place.ip, place.port)) for place in ours]
            if not ours:
                silent.add(line)
    return found


def _answer(host: str, port: int) -> str:
    headers = {"Authorization": "Bearer wrong", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{host}:{port}/v1/chat/completions", b"{}", headers)
    try:
        return str(urllib.request.urlopen(request, timeout=2).status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except (OSError, ValueError) as error:
        return type(error).__name__
    except Exception as error:  # noqa: BLE001 - a store answers what is no HTTP
        return type(error).__name__


def test_what_listens_is_what_the_table_says(tmp_path: Path) -> None:
    """Two ranks with a gateway, an SGLang server, reward workers: all on loopback, HTTP only with a key."""
    pytest.importorskip("openai")
    text = (ROOT / "launch/README.md").read_text().partition("## What listens where")[2]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.*?) ?\|$", text.partition("\n\n[SECURITY.md]")[0], re.MULTILINE)
    assert [row[0] for row in rows if row[0] not in ("what", "---")] == list(TABLE)
    where = {what: place for what, place, _ in rows}
    write_chat("configs/models/tiny_arithmetic", str(tmp_path / "chat"))
    with serving(Asked) as url:
        reward: dict[str, Any] = {
            "function": "megappo.rewards.http:scores",
            "batch": True,
            "options": {"url": url, "deadline_seconds": 90},
        }
        reward |= {"timeout_seconds": 100}
        done = start(
            "megappo", "train", "tests/examples/agent.yaml", f"run.directory={tmp_path / 'run'}", "run.steps=1",
            f"model.tokenizer={tmp_path / 'chat'}", "rollout.engine=sglang", "checkpoint=null",
            f"reward={json.dumps(reward)}", processes=2, environment=environment(), timeout_seconds=300,
        )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = Asked.found
    assert {listener.address for listener in found} == {"127.0.0.1"}, found
    for what, place in where.items():
        if TABLE.get(what) == HERE and what != "reward workers and tools":
            assert "loopback" in place or "`MASTER_ADDR`" in place, (what, place)
    assert where["reward workers and tools"] == "nowhere"
    assert not [listener for listener in found if any(name in listener.process for name in NOWHERE)]
    assert any("worker_main" in line for line in Asked.silent)
    of_http = [listener for listener in found if listener.answer.isdigit()]
    assert of_http and {listener.answer for listener in of_http} == {"401"}, found
    assert any("sglang" in listener.process for listener in of_http) and len(of_http) >= 2, of_http
