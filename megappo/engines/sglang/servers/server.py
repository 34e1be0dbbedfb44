"""Start one SGLang server as a child process, and end the server with all its files."""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megappo.config.sections.engine import ServerSettings
from megappo.engines.sglang.client import HEALTH, Endpoint, ServerFailure, call, takes, takes_any_key
from megappo.engines.sglang.servers.guard import ServerProcesses, clean_up
from megappo.engines.sglang.servers.rendezvous import ServerPart
from megappo.engines.sglang.servers.spec import ServerSpec
from megappo.errors import RunError, one_line
from megappo.files.json_values import JSONValue
from megappo.network.store import free_port
from megappo.observe.terminal.messages import show_message
from megappo.observe.terminal.progress import duration
from megappo.runtime.waiting import wait_until

STOP_SECONDS = 20.0  # above KILL_SECONDS, within which the guard kills the server
_FREEZE_SECONDS = 30.0
_IDLE_SECONDS = 10
_PART_SECONDS = 0.5
_PROGRESS_SECONDS = 30.0
"""Time between two messages of a starting server."""
_ANSWER_SECONDS = 5.0
_TAIL_CHARACTERS = 1500
_GUARD_SECONDS, _LONGEST_NUMBER = 60.0, 32
_LABELS, _PROOF = "extra-metric-labels", "megappo_server"
"""SGLang's argument for a secret label, and the name of the label in `/server_info`. A client with the key can verify
from the label that this is the started server."""
WEIGHTS, CACHES = ("weights",), ("kv_cache", "cuda_graph")
"""Parts of the memory of a server, with SGLang's names. Only generation needs the parts in `CACHES`."""


class EngineError(RunError):
    """Fatal failure of the engine. Its servers cannot be started, are not reachable, or reject requests."""


@dataclass
class Server:
    """One running server, or a part of a server on one machine. Created by `start_server`."""

    endpoint: Endpoint
    guard: subprocess.Popen[bytes]
    session: int
    """Process id of the server, which is the leader of a new session."""
    scratch: Path
    """Folder of the sockets and the key of the server. The guard removes the folder last."""
    log: Path
    deadline: float
    settings: ServerSettings
    key: str = "rollout.servers"
    """Path of the settings of the server, for errors."""
    part: ServerPart | None = None
    """Part of a server on several machines. The part ends after another part has ended."""
    proof: str = field(default="", repr=False)
    """Secret label that the server reports. See `_PROOF`."""
    lost: str | None = None
    """The reason that another part ended, if this part was stopped because of the other part."""
    stopped: bool = field(default=False)
    started_at: float = field(default_factory=time.monotonic)
    start_messages: int = 0
    """Number of messages during the start of the server."""
    released: set[str] = field(default_factory=set)
    """Parts of the memory that the server has released. With a released part the server must not generate, not even
    for a health check."""

    def release(self, parts: Iterable[str]) -> None:
        """Release the memory of `parts` when the server is idle. Raises ServerFailure. The server must then be
        replaced."""
        if wanted := sorted(set(parts) - self.released):
            # Wait until the server is idle. SGLang crashes if memory is released while the server is busy.
            self._ask(f"/flush_cache?timeout={_IDLE_SECONDS}", {})
            self.released |= set(wanted)
            self._ask("/release_memory_occupation", {"tags": wanted})

    def resume(self, parts: Iterable[str]) -> None:
        """Allocate the memory of `parts` again. The contents are lost. Raises as `release`."""
        if wanted := sorted(set(parts) & self.released):
            self._ask("/resume_memory_occupation", {"tags": wanted})
            self.released -= set(wanted)

    def _ask(self, path: str, body: Mapping[str, JSONValue]) -> None:
        call(self.endpoint, path, body, timeout_seconds=self.settings.sync_timeout_seconds)

    def __post_init__(self) -> None:
        if self.part is not None:
            threading.Thread(target=self._end_together, args=(self.part,), daemon=True).start()

    def _end_together(self, part: ServerPart) -> None:
        """End this part when another part ends, and report the end of this part to the others. Otherwise a collective
        would wait forever for a dead part."""

        def is_over() -> bool:
            if not self.running:
                if not self.stopped:
                    self.notify_parts(f"ended; {self.log} ends with: {self.tail()}")
                return True
            self.lost = part.rendezvous.why_ended(part.start)
            if self.lost is not None:
                self._order_end()
            return self.lost is not None

        wait_until(is_over, math.inf, every_seconds=_PART_SECONDS)

    def notify_parts(self, reason: str) -> None:
        """End the other parts, with a reason. The first reason counts."""
        if self.part is not None:
            here = f"part {self.part.rendezvous.node} of server {self.endpoint.index}, on {socket.gethostname()},"
            self.part.rendezvous.say_ended(self.part.start, f"{here} {reason}")

    @property
    def why_ended(self) -> str:
        """Reason of the end of the server, for errors."""
        return self.lost or f"{self.log} ends with: {self.tail()}"

    def wait_ready(self) -> None:
        """Wait until the server responds. Raises ServerFailure with the end of its log if the server ends or hangs."""
        wait_until(self.is_ready, math.inf, every_seconds=0.2)  # `is_ready` raises after the deadline

    def is_ready(self) -> bool:
        """Return whether the server responds. Raises ServerFailure with the end of its log if the server has ended or
        is late, or if another program uses its port."""
        if self.guard.poll() is not None:
            raise ServerFailure(f"{self.endpoint.name} ended during its start; {self.why_ended}")
        problem = None
        with suppress(ServerFailure):
            if self.part is not None and self.part.rendezvous.node > 0:  # other parts respond only to /health
                call(self.endpoint, HEALTH, timeout_seconds=_ANSWER_SECONDS, method="GET")
                return True
            problem = self._stranger()
            if problem is None:
                # SGLang sends this request to itself at startup, sometimes before the server listens. Without the
                # request, every weight sync waits half a second for Python's garbage collection, which traverses all
                # imported objects (benchmarks/results/2026-11-21-sglang-cpu.md).
                call(self.endpoint, "/freeze_gc", timeout_seconds=_FREEZE_SECONDS)
                return True
        if problem is not None:
            raise ServerFailure(f"another program uses the port of {self.endpoint.name}: it {problem}")
        if time.monotonic() > self.deadline:
            raise ServerFailure(
                f"{self.endpoint.name} did not respond within {self.key}.start_timeout_seconds "
                f"{self.settings.start_timeout_seconds:g}; {self.log} ends with: {self.tail()}"
            )
        self._report_start()
        return False

    def _report_start(self) -> None:
        """Print a message at regular intervals until the server has started."""
        seconds = time.monotonic() - self.started_at
        if seconds < (self.start_messages + 1) * _PROGRESS_SECONDS:
            return
        self.start_messages = int(seconds / _PROGRESS_SECONDS)
        last = one_line((self.tail() or "nothing").splitlines()[-1])
        limit = f"{self.key}.start_timeout_seconds is {self.settings.start_timeout_seconds:g}"
        show_message(
            f"{self.endpoint.name} has been starting for {duration(seconds)} ({limit}); its log ends with: {last}"
        )

    def _stranger(self) -> str | None:
        """Return the reason why the program at the port is another program, or None if it is this server. The key is
        sent only if the program rejects a random key. The secret label then identifies the server. Raises
        ServerFailure if there is no response."""
        if takes_any_key(self.endpoint, _ANSWER_SECONDS):
            return "accepts any key"
        if not takes(self.endpoint, _ANSWER_SECONDS):
            return "rejects the key of the server"
        said = call(self.endpoint, "/server_info", timeout_seconds=_FREEZE_SECONDS, method="GET")
        is_own = (said.get("extra_metric_labels") or {}).get(_PROOF) == self.proof
        return None if is_own else "does not report the label of the server"

    def tail(self) -> str:
        """Return the last characters of the log of the server."""
        return self.log.read_text(errors="replace")[-_TAIL_CHARACTERS:].strip() if self.log.exists() else ""

    @property
    def running(self) -> bool:
        """Whether the process of the server exists. The process may hang."""
        return not self.stopped and self.guard.poll() is None

    def stop(self) -> None:
        """End the server and remove its files. Returns after the removal."""
        if self.stopped:
            return
        self.stopped = True
        self._order_end()
        with suppress(subprocess.TimeoutExpired):
            self.guard.wait(STOP_SECONDS)
        if self.guard.poll() != 0:
            self._end_without_guard()

    def _order_end(self) -> None:
        assert self.guard.stdin is not None
        with suppress(OSError):
            self.guard.stdin.close()

    def _end_without_guard(self) -> None:
        """End a server whose guard hangs or was killed. The keeper ends the server, unless the keeper has ended too."""
        self.guard.kill()
        self.guard.wait()
        wait_until(lambda: not self.scratch.exists(), STOP_SECONDS, every_seconds=0.05)
        clean_up(ServerProcesses(self.session, str(self.scratch)), set(), str(self.scratch))


def named_in_url(host: str) -> str:
    """Return the host name for a URL to an interface of this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def start_server(
    spec: ServerSpec,
    index: int,
    sender: int,
    starts: int,
    *,
    port: int | None = None,
    key: str | None = None,
    part: ServerPart | None = None,
) -> Server:
    """Start a server or a part, on a free port and with a new key by default. Returns immediately."""
    # The path is short, because names of sockets in this folder may have at most 107 bytes.
    scratch = Path(tempfile.mkdtemp(prefix="mppo-", dir="/tmp"))
    key = secrets.token_hex(16) if key is None else key
    port = port or free_port(spec.host)
    config = scratch / "server.yaml"
    config.touch(mode=0o600)  # contains the key, which a command line would expose to other users
    arguments = spec.arguments(port, key) | (part.rendezvous.arguments(part.start) if part is not None else {})
    node, proof = part.rendezvous.node if part is not None else 0, secrets.token_hex(16)
    if not node:  # the first part answers requests
        arguments[_LABELS] = json.dumps({**json.loads(arguments.get(_LABELS) or "{}"), _PROOF: proof})
    config.write_text(json.dumps({k: v for k, v in arguments.items() if v is not None}))
    spec.log_directory.mkdir(parents=True, exist_ok=True)
    name = spec.called.replace(" ", "-") or f"engine-{index}"
    log = spec.log_directory / (f"{name}-part-{node}.log" if node else f"{name}.log")
    if arguments.get("log-level", "warning") != "warning":  # below this level SGLang writes all arguments into the log
        log.touch(mode=0o600)
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(scratch), str(log)]
    command += [",".join(map(str, spec.job_cores)), "--", sys.executable, "-m", spec.program, "--config", str(config)]
    try:
        guard = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=spec.environment(scratch, part),
            start_new_session=True,
            cwd=scratch,
        )
        session = _session_of(guard)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    url = f"http://{named_in_url(spec.address or spec.host)}:{port}"
    endpoint = Endpoint(index, url, key, sender, starts, spec.called)
    deadline = time.monotonic() + spec.settings.start_timeout_seconds
    return Server(endpoint, guard, session, scratch, log.absolute(), deadline, spec.settings, spec.key, part, proof)


def _session_of(guard: subprocess.Popen[bytes]) -> int:
    """Return the process id of the server of a guard, which is also its session id. Raises OSError if the guard does
    not report the id in time."""
    assert guard.stdout is not None
    said = b""
    if select.select([guard.stdout], [], [], _GUARD_SECONDS)[0]:
        said = os.read(guard.stdout.fileno(), _LONGEST_NUMBER)  # one write, of one line
    if not said.strip().isdigit():
        guard.kill()
        guard.wait()
        raise OSError(f"the guard of a server did not report the start of the server within {_GUARD_SECONDS:g} seconds")
    return int(said)
