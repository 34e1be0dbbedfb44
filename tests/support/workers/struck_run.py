"""A run of the command line whose SGLang servers are killed during the run.

Usage (under torchrun, one process): struck_run.py PLAN.json with
- `arguments` of the command line,
- `strikes`, a list of [place, number, seconds]. The newest server receives SIGKILL after `seconds` seconds, counted
  from the `number`th `sync` (a bucket is loaded), `restart` (a wait for a restarted server) or `rollout` (a request to
  generate).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import ClientSession

from megappo.cli import main
from megappo.engines.sglang.servers import fleet
from megappo.engines.sglang.servers.guard import session_pids
from megappo.engines.sglang.servers.server import Server
from megappo.engines.sglang.weights.sync import SyncRun

servers: list[Server] = []


def strike(seconds: float) -> None:
    server = servers[-1]

    def kill() -> None:
        if server.running:
            print(f"killed start {server.endpoint.starts}", flush=True)
        for pid in session_pids(server.session):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    if seconds:
        timer = threading.Timer(seconds, kill)
        timer.daemon = True  # the timer must not outlive the run
        timer.start()
    else:
        kill()


def arm(strikes: list[tuple[str, int, float]]) -> None:
    due = {(place, number): seconds for place, number, seconds in strikes}
    times: Counter[str] = Counter()

    def note(place: str) -> None:
        times[place] += 1
        seconds = due.pop((place, times[place]), None)
        if seconds is not None:
            strike(seconds)

    start, wait, load, post = fleet.start_server, Server.wait_ready, SyncRun.load, ClientSession.post

    def start_server(*arguments: Any, **named: Any) -> Server:
        servers.append(start(*arguments, **named))
        return servers[-1]

    def wait_ready(self: Server) -> None:
        if self.endpoint.starts > 1:
            note("restart")
        wait(self)

    def load_bucket(self: SyncRun, payloads: Any) -> None:
        note("sync")
        load(self, payloads)

    def send(self: ClientSession, url: str, **arguments: Any) -> Any:
        if url.endswith("/generate"):
            note("rollout")
        return post(self, url, **arguments)

    changes: list[tuple[Any, str, Callable[..., Any]]] = [
        (fleet, "start_server", start_server), (Server, "wait_ready", wait_ready), (SyncRun, "load", load_bucket),
        (ClientSession, "post", send),
    ]  # fmt: skip
    for place, name, change in changes:
        setattr(place, name, change)


if __name__ == "__main__":
    plan = json.loads(Path(sys.argv[1]).read_text())
    arm([(place, number, seconds) for place, number, seconds in plan["strikes"]])
    sys.exit(main(plan["arguments"]))
