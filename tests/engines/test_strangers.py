"""Other programs where a server should listen: none is believed, and none is told a key that it could not know."""

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

from megappo.config.engine import SGLangSettings
from megappo.engines.sglang import fleet
from megappo.engines.sglang.client import ServerFailure
from megappo.engines.sglang.fleet import KEY_VARIABLE
from megappo.engines.sglang.guard import session_pids
from megappo.engines.sglang.server import start_server
from megappo.engines.sglang.spec import ServerSpec
from megappo.plan.cache import PlannedCache
from megappo.runtime.process import Runtime
from tests.support import worlds

pytestmark = pytest.mark.waits

KEY = "the-servers-key"
Answer = Callable[[str, str], int]
"""Status for a path and a key."""


@contextmanager
def listening(answer: Answer) -> Iterator[tuple[int, list[str]]]:
    """Somebody else's program; its port, and the keys that it is told."""
    told: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            told.append(str(self.headers["Authorization"]).removeprefix("Bearer "))
            self.send_response(answer(self.path, told[-1]))
            self.end_headers()
            self.wfile.write(json.dumps({"success": True, "extra_metric_labels": {"model": "a"}}).encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], told
        server.shutdown()


@pytest.mark.parametrize(
    ("answer", "words", "is_told"),
    [
        (lambda path, key: 200, "accepts any key", False),
        (lambda path, key: 401, "rejects the key of the server", True),
        (lambda path, key: 200 if key == KEY else 401, "does not report the label of the server", True),
    ],
)
def test_another_program_at_a_servers_port_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer, words: str, is_told: bool
) -> None:
    path = worlds.fake_package(tmp_path / "packages", "sglang", "0.5.23")
    (tmp_path / "packages/sglang/launch_server.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", path)
    spec = ServerSpec(tmp_path, "float32", SGLangSettings(), (1,), False, tmp_path, PlannedCache(9000, 100), cores=(0,))
    with listening(answer) as (port, told):
        server = start_server(spec, 0, 0, 1, port=port, key=KEY)
        try:
            with pytest.raises(ServerFailure, match=f"another program uses the port of server 0 .*: it {words}"):
                server.wait_ready()
        finally:
            server.stop()
    assert (KEY in told) == is_told and told
    assert not session_pids(server.session)


def test_a_server_that_this_machine_cannot_start_again_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To all ranks, as what becomes of this rank's servers; what was made for it is removed."""
    path = worlds.fake_package(tmp_path / "packages", "sglang", "0.5.23")
    (tmp_path / "packages/sglang/launch_server.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(fleet, "all_gather_objects", lambda value: [value])
    monkeypatch.setattr(fleet, "agreed", lambda work, *_caught: work())
    settings = SGLangSettings(placement="disaggregated", engines=1)
    spec = ServerSpec(tmp_path, "float32", settings, (1,), False, tmp_path, PlannedCache(9000, 100))
    servers = fleet.Fleet(spec, Runtime(0, 1, 0, torch.device("cpu")))
    servers.servers[0].stop()
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\n")
    silent.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(silent))
    made, mkdtemp = list[str](), tempfile.mkdtemp

    def noted(**given: str) -> str:
        made.append(mkdtemp(**given))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    said = servers.restart_dead([0]).error
    assert said is not None and said.startswith("the guard of a server did not report the start")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    said = servers.restart_dead([0]).error
    assert said is not None and "No such file or directory" in said
    assert len(made) == 2 and not any(map(os.path.exists, made))


def external(monkeypatch: pytest.MonkeyPatch, folder: Path, port: int, patience_seconds: float = 60.0) -> str:
    """What ends a run whose server is to be at a port."""
    monkeypatch.setattr(fleet, "all_gather_objects", lambda value: [value])
    monkeypatch.setattr(fleet, "agreed", lambda work, *_caught: work())
    settings = SGLangSettings(
        placement="disaggregated", urls=(f"http://127.0.0.1:{port}",), start_timeout_seconds=patience_seconds
    )
    spec = ServerSpec(folder, "float32", settings, (1,), False, folder, PlannedCache(9000, 100))
    return str(fleet.Fleet(spec, Runtime(0, 1, 0, torch.device("cpu"))).start_all().error)


@pytest.mark.parametrize(
    ("key", "answer", "words"),
    [
        ("wrong", lambda path, key: 401, f"rejects the key in {KEY_VARIABLE}; set {KEY_VARIABLE} to the key of"),
        ("", lambda path, key: 401, f"requires a key, and {KEY_VARIABLE} is empty; export the key of the server"),
        (KEY, lambda path, key: 200, "accepts any key, so the server was started without a key, or is another"),
    ],
)  # fmt: skip
def test_a_key_that_does_not_fit_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, answer: Answer, words: str
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    with listening(answer) as (port, told):
        said = external(monkeypatch, tmp_path, port)
    assert said.startswith(f"server 0 (http://127.0.0.1:{port}) of rollout.sglang.urls {words}")
    assert KEY not in told


def test_a_server_at_which_nobody_listens_is_told_after_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = worlds.closed_port()
    said = external(monkeypatch, tmp_path, port, 7.0)
    assert "of rollout.sglang.urls returned no healthy response within start_timeout_seconds 7" in said
    told = " ".join(capsys.readouterr().err.split())
    assert told.count(f"server 0 (http://127.0.0.1:{port}) cannot be reached for /model_info") == 1
    assert "Connection refused" in told and "the run waits for start_timeout_seconds 7; start the server" in told
