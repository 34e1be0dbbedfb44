"""`megappo serve` with a replacement for SGLang: supervision, signals, and settings that are refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from megappo.commands.serve import StopRequest, shared_key
from megappo.config import ConfigError
from megappo.engines.sglang.servers.fleet import KEY_VARIABLE
from megappo.engines.sglang.servers.guard import session_pids
from tests.support import worlds
from tests.support.models import write_model

pytestmark = [pytest.mark.slow, pytest.mark.waits]

CONFIG = "configs/sglang_disaggregated.yaml"
FAKE = """
import http.server, json, os, sys, tempfile
from pathlib import Path
arguments = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
tempfile.NamedTemporaryFile(delete=False).write(b"left behind")
Path(os.environ["FAKE"], f"{os.getpid()}.json").write_text(json.dumps(arguments))
if os.environ.get("FAKE_FAILS"):
    sys.exit("out of memory")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers.get("Authorization") == f"Bearer {arguments['api-key']}"
        self.send_response(200 if right or "api-key" not in arguments else 401)
        self.end_headers()
        labels = json.loads(arguments.get("extra-metric-labels", "{}"))
        self.wfile.write(json.dumps({"extra_metric_labels": labels}).encode())
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        Path(os.environ["FAKE"], "asked").open("a").write(self.path)
        self.do_GET()
http.server.ThreadingHTTPServer((arguments["host"], arguments["port"]), Handler).serve_forever()
"""


class Site:
    """The folders of the replacement for SGLang and of its recorded arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, worlds.closed_port()
        self.path = worlds.fake_package(folder / "packages", "sglang", "0.5.23")
        (folder / "packages" / "sglang" / "launch_server.py").write_text(FAKE)
        (folder / "starts").mkdir()
        (folder / "tmp").mkdir()

    def serve(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        environment = worlds.environment(PYTHONPATH=self.path, FAKE=str(self.folder / "starts")) | variables
        command = [sys.executable, "-m", "megappo", "serve", CONFIG, "--port", str(self.port), *arguments]
        command += [f"run.directory={self.folder / 'run'}"]
        return subprocess.Popen(command, cwd=worlds.ROOT, env=environment, stderr=subprocess.PIPE, text=True)

    def serve_parts(self) -> list[subprocess.Popen[str]]:
        """Start a server on two machines, which are the same machine in the test. Part 1 is started first and waits."""
        meeting = worlds.closed_port()
        arguments = (
            "--meet",
            f"127.0.0.1:{meeting}",
            "rollout.servers={placement: disaggregated, tensor_parallel: 2, nodes: 2}",
        )
        key = {KEY_VARIABLE: "secret"}
        parts = [
            self.serve("--part", "1", "--port", "0", *arguments, **key),
            self.serve("--part", "0", *arguments, **key),
        ]
        return parts[::-1]

    def arguments_of(self, pid: int) -> dict[str, Any]:
        """Return the arguments of a started server."""
        arguments: dict[str, Any] = json.loads((self.folder / "starts" / f"{pid}.json").read_text())
        return arguments

    def started(self) -> list[int]:
        """Return the process ids of the servers, the oldest first."""
        files = sorted((self.folder / "starts").glob("*.json"), key=lambda p: p.stat().st_mtime)
        return [int(path.stem) for path in files]

    def await_servers(self, count: int, answers: Callable[[], bool] | None = None) -> list[int]:
        """Wait until this number of servers has been started and the last one answers."""
        deadline = time.monotonic() + 60
        while len(servers := self.started()) < count or not (answers or self.answers)():
            assert time.monotonic() < deadline, servers
            time.sleep(0.1)
        return servers

    def answers(self, key: str = "secret") -> bool:
        question = urllib.request.Request(f"http://127.0.0.1:{self.port}/", headers={"Authorization": f"Bearer {key}"})
        try:
            return bool(urllib.request.urlopen(question, timeout=5).status == 200)
        except OSError:
            return False


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    created = Site(tmp_path)
    yield created
    assert not any(session_pids(pid) for pid in created.started())


def test_dead_server_is_restarted(site: Site) -> None:
    """The server has the arguments of the servers of trainers. Its key is in no readable file."""
    serving = site.serve("rollout.servers.arguments={chunked-prefill-size: 64}", **{KEY_VARIABLE: "secret"})
    (first,) = site.await_servers(1)
    assert not site.answers("wrong")
    arguments = json.loads((site.folder / "starts" / f"{first}.json").read_text())
    assert arguments["load-format"] == "dummy" and arguments["skip-tokenizer-init"]
    assert arguments["disable-shared-experts-fusion"]
    assert arguments["max-total-tokens"] == 16384 and arguments["chunked-prefill-size"] == 64
    assert (arguments["host"], arguments["port"], arguments["api-key"]) == ("127.0.0.1", site.port, "secret")
    os.kill(first, signal.SIGKILL)
    _, second = site.await_servers(2)
    serving.send_signal(signal.SIGUSR1)  # the signal is for the trainers of the job
    time.sleep(0.5)
    assert serving.poll() is None and session_pids(second)
    deadline = time.monotonic() + 30
    request_log = site.folder / "starts" / "asked"
    while not (request_log.exists() and request_log.read_text().endswith("/freeze_gc")):  # before the first use
        assert time.monotonic() < deadline
        time.sleep(0.1)
    serving.send_signal(signal.SIGTERM)
    _, output = serving.communicate(timeout=30)
    assert serving.returncode == 0
    assert "it is started again" in output and "secret" not in output
    assert not session_pids(second)
    assert (site.folder / "run" / "engines" / "engine-0.log").exists()


def test_parts_of_a_server_start_and_end_together(site: Site) -> None:
    """The server is on two machines. If one part ends, both are restarted once. If the first part is given up, the
    other part ends."""
    parts = site.serve_parts()
    for victim in (1, 0):
        started = site.await_servers(4 if victim == 0 else 2)[-2:]
        nodes = {site.arguments_of(pid)["node-rank"]: pid for pid in started}
        assert sorted(nodes) == [0, 1] and {site.arguments_of(pid)["nnodes"] for pid in started} == {2}
        os.kill(nodes[victim], signal.SIGKILL)
    started = site.await_servers(6)[-2:]
    environments = [psutil.Process(pid).environ() for pid in started]
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        assert len({environment[name] for environment in environments}) == 1
    parts[0].kill()  # for example with its machine
    _, output = parts[1].communicate(timeout=30)
    assert parts[1].returncode == 1
    text = output.replace("\n", " ")
    assert text.count("it is started again") == 3 and "part 0 of server 0, on" in text
    assert "the process that started the first part of the server has ended" in text
    parts[0].communicate(timeout=30)
    deadline = time.monotonic() + 30
    while any(session_pids(pid) for pid in started):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_server_ends_with_a_killed_supervisor(site: Site) -> None:
    serving = site.serve("--linger", "30", **{KEY_VARIABLE: "secret"})
    (server,) = site.await_servers(1)
    serving.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert site.answers()  # the trainers may need the server
    serving.kill()
    serving.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while session_pids(server):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_server_without_readiness_is_abandoned(site: Site) -> None:
    serving = site.serve(FAKE_FAILS="yes")
    _, output = serving.communicate(timeout=60)
    assert serving.returncode == 1
    assert "out of memory; the server was started 2 times" in output.replace("\n", " ")
    assert len(site.started()) == 2


def test_servers_without_a_key_share_a_new_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several servers may start at the same time. No other user can read the key."""
    folder = tmp_path / "run" / "engines"
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(shared_key, [folder] * 8))
    (key,) = keys
    assert len(key) == 32 and key == shared_key(folder) != shared_key(tmp_path / "other")
    assert [path.name for path in folder.iterdir()] == ["key"]
    assert (folder / "key").stat().st_mode & 0o777 == 0o600
    output = capsys.readouterr().err
    assert f"the key is the one in {folder / 'key'}; export {KEY_VARIABLE}=$(cat {folder / 'key'})" in output
    assert key not in output
    (folder / "key").chmod(0o640)
    with pytest.raises(ConfigError, match="others can read .*, which holds the servers' key; remove it"):
        shared_key(folder)


def test_server_without_a_key_creates_a_key(site: Site) -> None:
    serving = site.serve(**{KEY_VARIABLE: ""})
    site.await_servers(1, lambda: site.answers((site.folder / "run" / "engines" / "key").read_text()))
    assert not site.answers("")
    serving.send_signal(signal.SIGINT)
    _, output = serving.communicate(timeout=30)
    assert serving.returncode == 0 and f"{KEY_VARIABLE} is empty" in output


def test_stop_request() -> None:
    stop = StopRequest(30)
    assert not stop.due
    stop.receive(signal.SIGTERM)
    stop.receive(signal.SIGTERM)
    start = time.monotonic()
    stop.wait(0.1)
    assert not stop.due and time.monotonic() - start < 5
    stop.receive(signal.SIGINT)
    assert stop.due
    stop.wait(60)
    assert time.monotonic() - start < 5


def test_invalid_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors_of: Callable[..., str]
) -> None:
    worlds.fake_package(tmp_path, "sglang", "0.5.23")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(worlds.ROOT)
    assert "cannot be served; set rollout.servers.kind=sglang" in errors_of("serve", worlds.QUICKSTART)
    assert "tensor_parallel 3 does not divide" in errors_of("serve", CONFIG, "rollout.servers.tensor_parallel=3")
    for option, text, rule in (
        ("--port", "70000", "a whole number from 0 to 65535"),
        ("--port", "-1", "a whole number from 0 to 65535"),
        ("--port", "http", "a whole number from 0 to 65535"),
        ("--index", "-1", "a whole number from 0 to 2147483647"),
        ("--linger", "-0.5", "a number of seconds from 0 to 1e+06"),
        ("--linger", "nan", "a number of seconds from 0 to 1e+06"),
        ("--linger", "inf", "a number of seconds from 0 to 1e+06"),
        ("--linger", "soon", "a number of seconds from 0 to 1e+06"),
        ("--part", "1", "a whole number from 0 to 0"),
    ):
        assert f"{option} is '{text}', must be {rule}" in errors_of("serve", CONFIG, f"{option}={text}")
    with worlds.listening() as taken:
        port = str(taken.getsockname()[1])
        assert f"nothing can listen on --host 127.0.0.1 --port {port}" in errors_of("serve", CONFIG, "--port", port)

    two = "rollout.servers={placement: disaggregated, tensor_parallel: 2, nodes: 2}"
    assert "rollout.servers.nodes is 1, --meet is for more" in errors_of("serve", CONFIG, "--meet", "a:1")
    assert "nodes is 2, their parts need --part N and --meet HOST:PORT" in errors_of("serve", CONFIG, two)
    assert "--meet is 'node7', must be HOST:PORT" in errors_of("serve", CONFIG, two, "--meet", "node7")
    monkeypatch.setattr("megappo.commands.serve.runs_on_cuda", lambda settings: True)
    output = errors_of("serve", CONFIG, "model.dtype=float32")
    message = "model.dtype is float32, which its GPU kernels do not support; set model.dtype to bfloat16, or name"
    assert message in output


def test_gpu_model_is_refused_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors_of: Callable[..., str]
) -> None:
    worlds.fake_package(tmp_path, "sglang", "0.5.23")
    monkeypatch.syspath_prepend(tmp_path)
    folder = write_model(tmp_path / "m", "gemma2", 1)
    output = errors_of("serve", str(worlds.ROOT / CONFIG), f"model.path={folder}", "runtime.device=cpu")
    message = "SGLang cannot serve this model: SGLang's gemma2 needs a GPU, and the run is on a CPU; name another"
    assert message in output


def test_number_of_ranks_of_a_server(output_of: Callable[..., str]) -> None:
    """The command prints the number of machines, and of devices per machine."""
    for nodes in (1, 2):
        arguments = ["rollout.servers.tensor_parallel=4", f"rollout.servers.nodes={nodes}"]
        assert output_of("serve", str(worlds.ROOT / CONFIG), "--ranks", *arguments) == f"{nodes} {4 // nodes}\n"
