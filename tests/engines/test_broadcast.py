"""Tests of the process group for weight broadcasts to external servers. A stand-in for SGLang may die during a
broadcast."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megappo.engines.sglang.client import Endpoint, ServerFailure
from megappo.engines.sglang.weights.transport import BroadcastTransport
from megappo.network.store import free_port

pytestmark = pytest.mark.waits

TIMEOUT_SECONDS = 20.0
BYTES = 1 << 16


class StandIn(BaseHTTPRequestHandler):
    """Receives the first bucket and kills itself on the second request."""

    group: Any = None
    taken = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/init_weights_update_group":
            StandIn.group = joined(body)
        elif StandIn.taken:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            StandIn.group.broadcast(torch.empty(BYTES, dtype=torch.uint8), 0).wait()
            StandIn.taken = 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"success": true}')

    def log_message(self, format: str, *arguments: object) -> None:
        return


def joined(body: dict[str, Any]) -> Any:
    """Join the group on the server's side."""
    patience = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    store = dist.TCPStore(body["master_address"], body["master_port"], body["world_size"], False, patience)
    meeting, name = dist.PrefixStore(body["group_name"], store), body["group_name"]
    made = distributed_c10d._new_process_group_helper(
        body["world_size"], body["rank_offset"], [], dist.Backend("gloo"), meeting, group_name=name, timeout=patience
    )
    return made[0]


@pytest.fixture
def server() -> Iterator[str]:
    """Yield the address of a stand-in."""
    port = free_port("127.0.0.1")

    def serve() -> None:
        HTTPServer(("127.0.0.1", port), StandIn).serve_forever()

    process = multiprocessing.get_context("fork").Process(target=serve)
    process.start()
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.join()


def test_server_death_in_broadcast_removes_its_group(server: str) -> None:
    """NCCL's watchdog would end the trainer by default."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = set(distributed_c10d._world.pg_map)
        transport = BroadcastTransport(Endpoint(0, server, "key", 0, 1), 1, 0, "127.0.0.1", TIMEOUT_SECONDS, "gloo")
        bucket: Any = SimpleNamespace(
            slots=[SimpleNamespace(name="w", dtype=torch.uint8, shape=(BYTES,))], n_bytes=BYTES
        )
        load = transport.prepare([(bucket, torch.zeros(BYTES, dtype=torch.uint8))], ())
        load()
        assert len(set(distributed_c10d._world.pg_map) - before) == 1
        assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
        with pytest.raises(ServerFailure):
            load()
        transport.close()
        assert set(distributed_c10d._world.pg_map) == before
    finally:
        dist.destroy_process_group()
