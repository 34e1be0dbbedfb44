"""Starts one SGLang server as a child process, and ends it with everything it made."""

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

from megappo.config.engine import SGLangSettings
from megappo.engines.sglang.client import HEALTH, Endpoint, ServerFailure, call, takes, takes_any_key
from megappo.engines.sglang.guard import ServerProcesses, clean_up
from megappo.engines.sglang.rendezvous import ServerPart
from megappo.engines.sglang.spec import ServerSpec
from megappo.errors import RunError, one_line
from megappo.observe.json_values import JSONValue
from megappo.observe.messages import tell
from megappo.observe.progress import duration
from megappo.runtime.store import free_port
from megappo.runtime.waiting import wait_until

STOP_SECONDS = 20.0  # above KILL_SECONDS, within which the guard kills the server
_FREEZE_SECONDS = 30.0
_IDLE_SECONDS = 10
_PART_SECONDS = 0.5
_PROGRESS_SECONDS = 30.0
"""Time between two messages of a server that is still starting."""
_ANSWER_SECONDS = 5.0
_TAIL_CHARACTERS = 1500
_GUARD_SECONDS, _LONGEST_NUMBER = 60.0, 32
_LABELS, _PROOF = "extra-metric-labels", "megappo_server"
"""SGLang's argument that hands a server a secret label, and the label's name in `/server_info`: whoever has the key can
tell from it that this is the server which was started."""
WEIGHTS, CACHES = ("weights",), ("kv_cache", "cuda_graph")
"""Parts of a server's memory by SGLang's names; those of `CACHES` are needed only to generate."""


class EngineError(RunError):
    """The engine cannot go on: its servers cannot be started or reached, or refuse what it asks."""


@dataclass
class Server:
    """One running server, or a part of it on one of its machines; made by `start_server`."""

    endpoint: Endpoint
    guard: subprocess.Popen[bytes]
    session: int
    """Process id of the server, which leads a session of its own."""
    scratch: Path
    """Folder of the server's sockets and key; the guard removes it last."""
    log: Path
    deadline: float
    settings: SGLangSettings
    key: str = "rollout.sglang"
    """Path of the server's settings, for errors."""
    part: ServerPart | None = None
    """Part of a server on several machines; it ends where another part has ended."""
    proof: str = field(default="", repr=False)
    """Secret label that the server reports; see `_PROOF`."""
    lost: str | None = None
    """The reason that another part ended, if this part was stopped because of the other part."""
    stopped: bool = field(default=False)
    started_at: float = field(default_factory=time.monotonic)
    start_messages: int = 0
    """Number of messages during the start of the server."""
    released: set[str] = field(default_factory=set)
    """Parts of the memory that the server has released. While there is one it must not generate, not even for a health
    check."""

    def release(self, parts: Iterable[str]) -> None:
        """Release the memory of `parts` once the server is idle. Raises ServerFailure, after which the server must be
        replaced."""
        if wanted := sorted(set(parts) - self.released):
            # Waits until the server is idle: SGLang dies of a release while it is busy.
            self._ask(f"/flush_cache?timeout={_IDLE_SECONDS}", {})
            self.released |= set(wanted)
            self._ask("/release_memory_occupation", {"tags": wanted})

    def resume(self, parts: Iterable[str]) -> None:
        """Allocate the memory of `parts` again; its contents are lost. Raises as `release`."""
        if wanted := sorted(set(parts) & self.released):
            self._ask("/resume_memory_occupation", {"tags": wanted})
            self.released -= set(wanted)

    def _ask(self, path: str, body: Mapping[str, JSONValue]) -> None:
        call(self.endpoint, path, body, timeout_seconds=self.settings.sync_timeout_seconds)

    def __post_init__(self) -> None:
        if self.part is not None:
            threading.Thread(target=self._end_together, args=(self.part,), daemon=True).start()

    def _end_together(self, part: ServerPart) -> None:
        """End this part when another part ends, and tell the others when this one does: a collective would wait for a
        dead part for ever."""

        def is_over() -> bool:
            if not self.running:
                if not self.stopped:
                    self.tell_parts(f"ended; {self.log} ends with: {self.tail()}")
                return True
            self.lost = part.rendezvous.why_ended(part.start)
            if self.lost is not None:
                self._order_end()
            return self.lost is not None

        wait_until(is_over, math.inf, every_seconds=_PART_SECONDS)

    def tell_parts(self, reason: str) -> None:
        """Tell the other parts to end, with a reason; the first reason counts."""
        if self.part is not None:
            here = f"part {self.part.rendezvous.node} of server {self.endpoint.index}, on {socket.gethostname()},"
            self.part.rendezvous.say_ended(self.part.start, f"{here} {reason}")

    @property
    def why_ended(self) -> str:
        """Why the server ended, for errors."""
        return self.lost or f"{self.log} ends with: {self.tail()}"

    def wait_ready(self) -> None:
        """Wait until the server answers. Raises ServerFailure with the end of its log where it ends or hangs
        instead."""
        wait_until(self.is_ready, math.inf, every_seconds=0.2)  # `is_ready` raises after the deadline

    def is_ready(self) -> bool:
        """Whether the server answers. Raises ServerFailure with the end of its log where it has ended or is late, and
        where another program listens at its port."""
        if self.guard.poll() is not None:
            raise ServerFailure(f"{self.endpoint.name} ended while it started; {self.why_ended}")
        problem = None
        with suppress(ServerFailure):
            if self.part is not None and self.part.rendezvous.node > 0:  # other parts answer /health alone
                call(self.endpoint, HEALTH, timeout_seconds=_ANSWER_SECONDS, method="GET")
                return True
            problem = self._stranger()
            if problem is None:
                # SGLang sends itself this when it starts, now and then before it listens. Without it every weight sync
                # waits half a second for Python's garbage collection, which looks through all that was imported
                # (benchmarks/results/2026-11-21-sglang-cpu.md).
                call(self.endpoint, "/freeze_gc", timeout_seconds=_FREEZE_SECONDS)
                return True
        if problem is not None:
            raise ServerFailure(f"another program listens where {self.endpoint.name} is to: it {problem}")
        if time.monotonic() > self.deadline:
            raise ServerFailure(
                f"{self.endpoint.name} gave no answer within {self.key}.start_timeout_seconds "
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
        tell(f"{self.endpoint.name} has been starting for {duration(seconds)} ({limit}); its log ends with: {last}")

    def _stranger(self) -> str | None:
        """Why the program at the server's port is another one; None: it is this server. The key is sent only where a
        random one is refused, and the server is recognised by the secret label that it was started with. Raises
        ServerFailure where nobody answers."""
        if takes_any_key(self.endpoint, _ANSWER_SECONDS):
            return "takes any key"
        if not takes(self.endpoint, _ANSWER_SECONDS):
            return "refuses the server's key"
        said = call(self.endpoint, "/server_info", timeout_seconds=_FREEZE_SECONDS, method="GET")
        is_own = (said.get("extra_metric_labels") or {}).get(_PROOF) == self.proof
        return None if is_own else "does not tell what the server was given"

    def tail(self) -> str:
        """The last characters of the server's log."""
        return self.log.read_text(errors="replace")[-_TAIL_CHARACTERS:].strip() if self.log.exists() else ""

    @property
    def running(self) -> bool:
        """Whether the server's process exists (it may hang)."""
        return not self.stopped and self.guard.poll() is None

    def stop(self) -> None:
        """End the server and remove what it made; returns when all of that is gone."""
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
        """End a server whose guard hangs or was killed: the keeper ends it then, unless that is gone too."""
        self.guard.kill()
        self.guard.wait()
        wait_until(lambda: not self.scratch.exists(), STOP_SECONDS, every_seconds=0.05)
        clean_up(ServerProcesses(self.session, str(self.scratch)), set(), str(self.scratch))


def named_in_url(host: str) -> str:
    """The name by which a URL on this machine addresses one of its own interfaces."""
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
    """Start a server or a part of it, on a free port and under a new key unless they are given; returns at once."""
    # Short, because the names of sockets in it may not be longer than 107 bytes.
    scratch = Path(tempfile.mkdtemp(prefix="mppo-", dir="/tmp"))
    key = secrets.token_hex(16) if key is None else key
    port = port or free_port(spec.host)
    config = scratch / "server.yaml"
    config.touch(mode=0o600)  # it holds the key, which a command line would show to everybody
    arguments = spec.arguments(port, key) | (part.rendezvous.arguments(part.start) if part is not None else {})
    node, proof = part.rendezvous.node if part is not None else 0, secrets.token_hex(16)
    if not node:  # the first part answers requests
        arguments[_LABELS] = json.dumps({**json.loads(arguments.get(_LABELS) or "{}"), _PROOF: proof})
    config.write_text(json.dumps({k: v for k, v in arguments.items() if v is not None}))
    spec.log_directory.mkdir(parents=True, exist_ok=True)
    name = spec.called.replace(" ", "-") or f"engine-{index}"
    log = spec.log_directory / (f"{name}-part-{node}.log" if node else f"{name}.log")
    if arguments.get("log-level", "warning") != "warning":  # below it SGLang writes all of its arguments into the log
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
    """Process id, and session, of the server that a guard has started. Raises OSError where the guard does not report
    it in time."""
    assert guard.stdout is not None
    said = b""
    if select.select([guard.stdout], [], [], _GUARD_SECONDS)[0]:
        said = os.read(guard.stdout.fileno(), _LONGEST_NUMBER)  # one write, of one line
    if not said.strip().isdigit():
        guard.kill()
        guard.wait()
        raise OSError(
            f"what looks after a server did not say within {_GUARD_SECONDS:g} seconds that it has started the server"
        )
    return int(said)
