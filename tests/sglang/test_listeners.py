"""Listening sockets of a run with SGLang, compared with the table of the documentation."""

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

from tests.support.harness import start
from tests.support.places import ROOT
from tests.support.rewards import serving
from tests.support.worlds import environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the full environment"),
]
ONE_MACHINE = "a run on one machine"
TABLE = {
    "an SGLang server": ONE_MACHINE,
    "the ranks of one server on one machine": ONE_MACHINE,
    "the stores at which parts and ranks of a server on several machines meet": "several machines",
    "sockets to the ranks of such a server with `data_parallel_attention` (SGLang's)": "data_parallel_attention",
    "a further part of such a server": "several machines",
    "the store of rank 0, and those of weight broadcasts": ONE_MACHINE,
    "torchrun under `launch/torchrun.sh` on one machine": ONE_MACHINE,
    "torchrun with `--nodes`, or with `MEGAPPO_LAUNCHER=torchrun`": "several machines",
    "a plain `torchrun`": "another launcher",
    "gloo": ONE_MACHINE,
    "NCCL": "GPUs",
    "an agent's endpoint (the gateway)": ONE_MACHINE,
    "reward workers and tools": ONE_MACHINE,
}
"""Rows of the table in `launch/README.md` with the kind of run that has the listener."""
NOWHERE = ("worker_main", "tool_worker", "agent_worker", "resource_tracker")


class Listener(NamedTuple):
    """A listening socket of a process of the run."""

    process: str
    address: str
    answer: str
    """Answer to an HTTP request with a wrong key: a status, or the name of an error for other protocols."""


class InspectingServer(BaseHTTPRequestHandler):
    """A reward server that inspects the run at the first sample."""

    listeners: ClassVar[list[Listener]] = []
    silent: ClassVar[set[str]] = set()
    """Processes of the run without listening sockets."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if not self.listeners:
            self.listeners.extend(listeners(self.client_address[1], self.silent))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": 0.5}).encode())

    def log_message(self, *_: Any) -> None:
        pass


def listeners(port: int, silent: set[str]) -> list[Listener]:
    """Return the listeners of the run that has a connection from this port."""
    (worker,) = (c.pid for c in psutil.net_connections() if c.pid and c.laddr.port == port and c.raddr)
    job = next(p for p in psutil.Process(worker).parents() if os.getsid(p.pid) == p.pid)
    result = []
    for process in job.children(recursive=True):
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            ours = [c.laddr for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
            result += [Listener(line, place.ip, _answer(place.ip, place.port)) for place in ours]
            if not ours:
                silent.add(line)
    return result


def _answer(host: str, port: int) -> str:
    headers = {"Authorization": "Bearer wrong", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{host}:{port}/v1/chat/completions", b"{}", headers)
    try:
        return str(urllib.request.urlopen(request, timeout=2).status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except (OSError, ValueError) as error:
        return type(error).__name__
    except Exception as error:  # noqa: BLE001 - a store does not answer with HTTP
        return type(error).__name__


def test_listeners_match_the_documented_table(tmp_path: Path) -> None:
    """The run has two ranks with a gateway, an SGLang server and reward workers. All sockets are on loopback, and HTTP
    requires a key."""
    pytest.importorskip("openai")
    text = (ROOT / "launch/README.md").read_text().partition("## What listens where")[2]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.*?) ?\|$", text.partition("\n\n[SECURITY.md]")[0], re.MULTILINE)
    assert [row[0] for row in rows if row[0] not in ("what", "---")] == list(TABLE)
    where = {what: place for what, place, _ in rows}
    with serving(InspectingServer) as url:
        reward: dict[str, Any] = {
            "function": "megappo.rewards.http:scores",
            "batch": True,
            "options": {"url": url, "deadline_seconds": 90},
        }
        reward |= {"timeout_seconds": 100}
        done = start(
            "megappo", "train", "configs/examples/11_agent/agent.yaml", f"run.directory={tmp_path / 'run'}",
            "run.steps=1",
            "rollout.servers.kind=sglang", "checkpoint=null",
            f"reward={json.dumps(reward)}", processes=2, environment=environment(), timeout_seconds=300,
        )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    open_listeners = InspectingServer.listeners
    assert {listener.address for listener in open_listeners} == {"127.0.0.1"}, open_listeners
    for what, place in where.items():
        if TABLE.get(what) == ONE_MACHINE and what != "reward workers and tools":
            assert "loopback" in place or "`MASTER_ADDR`" in place, (what, place)
    assert where["reward workers and tools"] == "nowhere"
    assert not [listener for listener in open_listeners if any(name in listener.process for name in NOWHERE)]
    assert any("worker_main" in line for line in InspectingServer.silent)
    of_http = [listener for listener in open_listeners if listener.answer.isdigit()]
    assert of_http and {listener.answer for listener in of_http} == {"401"}, open_listeners
    assert any("sglang" in listener.process for listener in of_http) and len(of_http) >= 2, of_http
