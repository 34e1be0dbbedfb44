"""Tests of other programs at the port of a server: detection, and protection of the key."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from megappo.config.sections.engine import ServerSettings
from megappo.engines.sglang.client import ServerFailure
from megappo.engines.sglang.servers import fleet
from megappo.engines.sglang.servers.fleet import KEY_VARIABLE
from megappo.engines.sglang.servers.guard import session_pids
from megappo.engines.sglang.servers.server import start_server
from megappo.engines.sglang.servers.spec import ServerSpec
from megappo.plan.bytes.cache import PlannedCache
from megappo.runtime.process import Runtime
from tests.support import worlds

pytestmark = pytest.mark.waits

KEY = "the-servers-key"
Answer = Callable[[str, str], int]
"""Status for a path and a key."""


@contextmanager
def listening(answer: Answer) -> Iterator[tuple[int, list[str]]]:
    """Run an unrelated program. Yield its port and the keys that it receives."""
    received_keys: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            received_keys.append(str(self.headers["Authorization"]).removeprefix("Bearer "))
            self.send_response(answer(self.path, received_keys[-1]))
            self.end_headers()
            self.wfile.write(json.dumps({"success": True, "extra_metric_labels": {"model": "a"}}).encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], received_keys
        server.shutdown()


@pytest.mark.parametrize(
    ("answer", "message", "gets_key"),
    [
        (lambda path, key: 200, "accepts any key", False),
        (lambda path, key: 401, "rejects the key of the server", True),
        (lambda path, key: 200 if key == KEY else 401, "does not report the label of the server", True),
    ],
)
def test_other_program_at_server_port_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer, message: str, gets_key: bool
) -> None:
    path = worlds.fake_package(tmp_path / "packages", "sglang", "0.5.23")
    (tmp_path / "packages/sglang/launch_server.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", path)
    spec = ServerSpec(tmp_path, "float32", ServerSettings(), (1,), False, tmp_path, PlannedCache(9000, 100), cores=(0,))
    with listening(answer) as (port, received_keys):
        server = start_server(spec, 0, 0, 1, port=port, key=KEY)
        try:
            with pytest.raises(ServerFailure, match=f"another program uses the port of server 0 .*: it {message}"):
                server.wait_ready()
        finally:
            server.stop()
    assert (KEY in received_keys) == gets_key and received_keys
    assert not session_pids(server.session)


def test_failed_restart_is_reported_and_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error becomes part of the result for all ranks. Temporary folders are removed."""
    path = worlds.fake_package(tmp_path / "packages", "sglang", "0.5.23")
    (tmp_path / "packages/sglang/launch_server.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(fleet, "all_gather_objects", lambda value: [value])
    monkeypatch.setattr(fleet, "agreed", lambda work, *_caught: work())
    settings = ServerSettings(placement="disaggregated", count=1)
    spec = ServerSpec(tmp_path, "float32", settings, (1,), False, tmp_path, PlannedCache(9000, 100))
    servers = fleet.Fleet(spec, Runtime(0, 1, 0, torch.device("cpu")))
    servers.servers[0].stop()
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\n")
    silent.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(silent))
    folders, mkdtemp = list[str](), tempfile.mkdtemp

    def noted(**arguments: str) -> str:
        folders.append(mkdtemp(**arguments))
        return folders[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    error = servers.restart_dead([0]).error
    assert error is not None and error.startswith("the guard of a server did not report the start")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    error = servers.restart_dead([0]).error
    assert error is not None and "No such file or directory" in error
    assert len(folders) == 2 and not any(map(os.path.exists, folders))


def external(monkeypatch: pytest.MonkeyPatch, folder: Path, port: int, patience_seconds: float = 60.0) -> str:
    """Return the error of a run with an external server at a port."""
    monkeypatch.setattr(fleet, "all_gather_objects", lambda value: [value])
    monkeypatch.setattr(fleet, "agreed", lambda work, *_caught: work())
    settings = ServerSettings(
        placement="disaggregated", urls=(f"http://127.0.0.1:{port}",), start_timeout_seconds=patience_seconds
    )
    spec = ServerSpec(folder, "float32", settings, (1,), False, folder, PlannedCache(9000, 100))
    return str(fleet.Fleet(spec, Runtime(0, 1, 0, torch.device("cpu"))).start_all().error)


@pytest.mark.parametrize(
    ("key", "answer", "message"),
    [
        ("wrong", lambda path, key: 401, f"rejects the key in {KEY_VARIABLE}; set {KEY_VARIABLE} to the key of"),
        ("", lambda path, key: 401, f"requires a key, and {KEY_VARIABLE} is empty; export the key of the server"),
        (KEY, lambda path, key: 200, "accepts any key, so the server was started without a key, or is another"),
    ],
)  # fmt: skip
def test_wrong_key_is_reported_immediately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, answer: Answer, message: str
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    with listening(answer) as (port, received_keys):
        error = external(monkeypatch, tmp_path, port)
    assert error.startswith(f"server 0 (http://127.0.0.1:{port}) of rollout.servers.urls {message}")
    assert KEY not in received_keys


def test_unreachable_server_is_reported_after_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = worlds.closed_port()
    error = external(monkeypatch, tmp_path, port, 7.0)
    assert "of rollout.servers.urls returned no healthy response within start_timeout_seconds 7" in error
    output = " ".join(capsys.readouterr().err.split())
    assert output.count(f"server 0 (http://127.0.0.1:{port}) cannot be reached for /model_info") == 1
    assert "Connection refused" in output and "the run waits for start_timeout_seconds 7; start the server" in output
