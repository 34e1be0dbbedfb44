"""Rendezvous of ranks: the interface of gloo on different machines, and connections without a name server."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megappo.network.interfaces import reached_at
from megappo.network.store import address_towards
from megappo.runtime.launchers import Ranks
from megappo.runtime.ranks.meeting import choose_interface
from tests.support.worlds import environment

SCRIPT = Path(__file__).parents[1] / "support" / "workers" / "two_nodes.sh"
GLOO = "GLOO_SOCKET_IFNAME"


def kernel_interfaces() -> dict[str, str]:
    """Return the names of the interfaces of this machine by IPv4 address, from the kernel."""
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            except OSError:
                continue
            names[socket.inet_ntoa(answer[20:24])] = name
    return names


OUTSIDE = next((address for address in kernel_interfaces() if not address.startswith("127.")), "127.0.0.1")


@pytest.mark.parametrize(
    ("ranks", "master", "others", "expected"),
    [
        (Ranks(0, 1, 0, None), "127.0.0.1", {}, "lo"),
        (Ranks(1, 2, 1, 2), "no-such-host.invalid", {}, "lo"),
        (Ranks(0, 4, 0, 2), OUTSIDE, {}, kernel_interfaces()[OUTSIDE]),
        (Ranks(3, 4, 1, None), OUTSIDE, {}, kernel_interfaces()[OUTSIDE]),
        (Ranks(0, 3, 0, 1), "localhost", {1: "", 2: OUTSIDE}, kernel_interfaces()[OUTSIDE]),
        (Ranks(0, 2, 0, 1), "127.0.0.1", {1: ""}, None),
        (Ranks(0, 2, 0, None), "::1", {1: ""}, None),
    ],
)
def test_interface_of_gloo(ranks: Ranks, master: str, others: dict[int, str], expected: str | None) -> None:
    """One machine uses loopback. Several machines use the interface of `MASTER_ADDR` or of the route to another
    machine."""
    if OUTSIDE == "127.0.0.1" and OUTSIDE in (master, *others.values()):
        pytest.skip("this machine has only the loopback interface")
    store = dist.HashStore()
    for rank, address in others.items():
        store.set(f"megappo/address-{rank}", address)
    chosen = {"MASTER_ADDR": master}
    choose_interface(chosen, ranks, store)
    assert chosen.get(GLOO) == expected
    own = {"MASTER_ADDR": master, GLOO: "ib7"}
    choose_interface(own, ranks, store)
    assert own[GLOO] == "ib7"


@pytest.mark.parametrize("name", ["lo", "eth9"])
def test_groups_with_remote_servers_avoid_loopback(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """These groups use the interface of the route to the servers. An interface of the user is not changed."""
    monkeypatch.setenv(GLOO, name)
    own = kernel_interfaces()[address_towards("192.0.2.7", 9)]
    with reached_at("192.0.2.7"):
        assert os.environ.get(GLOO) == (own if name == "lo" else name)
    with reached_at("127.0.0.1"):
        assert os.environ[GLOO] == name
    assert os.environ[GLOO] == name


def namespaces(*command: str) -> list[str]:
    """Return a command in a network, mount and host name namespace. Skip the test if this is not permitted."""
    before = ["unshare", "--net", "--mount", "--uts"]
    tools = shutil.which("unshare") and shutil.which("ip")
    if not tools or subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces need root, unshare and ip")
    return [*before, *command]


MEET = r"""
from megappo.runtime.memory.allocator import put_off_collections
put_off_collections()
import os, sys, psutil, torch, torch.distributed as dist
from megappo.config.schema import RuntimeSettings
from megappo.runtime.process import start_runtime
for port, address in enumerate(sys.argv[1:], 12345):
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    with start_runtime(RuntimeSettings(threads_per_rank=1)) as runtime:
        total = torch.tensor(float(runtime.rank + 1))
        dist.all_reduce(total)
        sys.stdout.write(f"rank {runtime.rank} at {address}: {total:g} over {os.environ['GLOO_SOCKET_IFNAME']}\n")
        sys.stdout.flush()
"""


@pytest.mark.slow
@pytest.mark.waits
def test_two_machines_with_names_for_loopback(tmp_path: Path) -> None:
    """Real all-reduce between two virtual machines. Each machine resolves its own name to 127.0.1.1."""
    masters = ["node0", "10.99.0.10", "fd99::10"]
    variables = {k: v for k, v in environment().items() if k not in ("RANK", GLOO)}
    command = namespaces(str(SCRIPT), str(tmp_path), sys.executable, "-c", MEET, *masters)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = [f"rank {rank} at {master}: 3 over wire{rank}" for master in masters for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


LOOK_UPS = """
import datetime, os, socket, subprocess, sys, threading, time
queries = []
def serve(socket_of_server):
    while True:
        query, client = socket_of_server.recvfrom(512)
        queries.append(query)
        refusal = query[:2] + bytes((129, 131)) + query[4:6] + bytes(6) + query[12:]
        threading.Timer(0.1, socket_of_server.sendto, (refusal, client)).start()
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["ip", "address", "add", "10.99.0.1/32", "dev", "lo"], check=True)
server.bind(("127.0.0.1", 53))
threading.Thread(target=serve, args=(server,), daemon=True).start()
open(sys.argv[1], "w").write("nameserver 127.0.0.1")
subprocess.run(["mount", "--bind", sys.argv[1], "/etc/resolv.conf"], check=True)
from megappo.runtime.launchers import Ranks
from megappo.runtime.ranks.meeting import meet
os.environ.update(MASTER_ADDR="10.99.0.1", MASTER_PORT="12345", GLOO_SOCKET_IFNAME="lo")
def rank(number):
    stores[number] = meet(Ranks(number, 64, number, 64), datetime.timedelta(seconds=60))
stores = {}
threads = [threading.Thread(target=rank, args=(number,)) for number in range(64)]
begin = time.monotonic()
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(stores), len(queries), f"{time.monotonic() - begin:.2f} seconds", file=sys.stderr)
assert len(stores) == 64 and not queries, len(queries)
try:
    socket.getaddrinfo("unknown.invalid", 80)
except OSError:
    pass
assert queries, "the name server must still resolve names"
"""


@pytest.mark.slow
@pytest.mark.waits
def test_ranks_connect_without_a_name_server(tmp_path: Path) -> None:
    """64 ranks connect to the store of rank 0 without a look-up of addresses. Each look-up would wait for the name
    server."""
    command = namespaces(sys.executable, "-c", LOOK_UPS, str(tmp_path / "resolv.conf"))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stderr)
