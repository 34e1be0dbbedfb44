"""Tests of servers that die during restarts. A stand-in program replaces SGLang."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megappo.config.sections.engine import ServerSettings
from megappo.engines.sglang.servers import fleet
from megappo.engines.sglang.servers.guard import session_pids
from megappo.engines.sglang.servers.spec import ServerSpec
from megappo.plan.bytes.cache import PlannedCache
from megappo.runtime.process import Runtime
from megappo.runtime.waiting import wait_until
from tests.support import worlds

pytestmark = pytest.mark.waits

PROGRAM = """
import json, os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

config = json.loads(Path(sys.argv[2]).read_text())
starts = Path(config["model-path"]) / "starts"
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
fate = json.loads((starts.parent / "fates").read_text()).get(str(len(starts.read_text())))
if fate == "before":
    os.kill(os.getpid(), signal.SIGKILL)
paths = []

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        paths.append(self.path)
        if fate == "after" and paths.count("/server_info") == 2:  # the server was ready
            os.kill(os.getpid(), signal.SIGKILL)
        self.send_response(200 if self.headers["Authorization"] == f"Bearer {config['api-key']}" else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"extra_metric_labels": json.loads(config["extra-metric-labels"])}).encode())

    do_POST = do_GET

HTTPServer(("127.0.0.1", config["port"]), Handler).serve_forever()
"""


@contextmanager
def servers(folder: Path, monkeypatch: pytest.MonkeyPatch, fates: str, most: int) -> Iterator[fleet.Fleet]:
    """Yield a fleet with one server. `fates` selects the starts that are killed, before or after the server
    is ready."""
    monkeypatch.setenv("PYTHONPATH", worlds.fake_package(folder / "packages", "sglang", "0.5.23"))
    monkeypatch.setattr(fleet, "all_gather_objects", lambda value: [value])
    monkeypatch.setattr(fleet, "agreed", lambda work, *_caught: work())
    (folder / "packages/sglang/launch_server.py").write_text(PROGRAM)
    (folder / "fates").write_text(fates)
    settings = ServerSettings(placement="disaggregated", count=1, max_restarts=most)
    spec = ServerSpec(folder, "float32", settings, (1,), False, folder, PlannedCache(9000, 100), cores=(0,))
    made = fleet.Fleet(spec, Runtime(0, 1, 0, torch.device("cpu")))
    try:
        yield made
    finally:
        made.close()


def kill(made: fleet.Fleet) -> None:
    for pid in session_pids(made.servers[0].session):
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not made.servers[0].running, 20.0, every_seconds=0.01)


def test_server_that_dies_during_restart_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server dies before and after its first answer. Every restart counts, and the run ends after
    `max_restarts`."""
    with servers(tmp_path, monkeypatch, '{"2": "before", "3": "after", "4": "before"}', most=5) as made:
        assert made.start_all().error is None
        kill(made)
        restarted = made.restart_dead([])
        assert restarted.error is None and restarted.restarts == 4
        assert [endpoint.starts for endpoint in restarted.endpoints] == [5] and made.servers[0].running
        kill(made)
        assert made.restart_dead([0]).restarts == 1
        kill(made)
        error = made.restart_dead([0]).error
        assert error is not None and "server 0 failed after 5 restarts, rollout.servers.max_restarts is 5" in error


def test_server_that_dies_during_check_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start counts as well. A suspect server that still answers keeps running."""
    with servers(tmp_path, monkeypatch, '{"1": "after"}', most=5) as made:
        started = made.start_all()
        assert started.error is None and started.restarts == 1 and started.endpoints[0].starts == 2
        again = made.restart_dead([0])
        assert again.error is None and again.restarts == 0 and again.endpoints[0].starts == 3
        assert (tmp_path / "starts").read_text() == "xx"


def test_server_fails_after_two_unsuccessful_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers(tmp_path, monkeypatch, '{"1": "before", "2": "before"}', most=5) as made:
        error = made.start_all().error
        assert error is not None and "server 0 (http://127.0.0.1:" in error and "ended during its start" in error
