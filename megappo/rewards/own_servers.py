"""Servers that a run starts for its rewards."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from megappo.config import Config
from megappo.config.own_server import OwnServerSettings
from megappo.engines.sglang.fleet import EVERYWHERE, address_among, machine_here
from megappo.engines.sglang.keeper import keep_running
from megappo.engines.sglang.server import Server, named_in_url, start_server
from megappo.engines.sglang.spec import ServerSpec
from megappo.errors import RunError
from megappo.rewards.http import ServerPlace
from megappo.runtime.objects import agreed, all_gather_objects
from megappo.runtime.process import Runtime
from megappo.runtime.store import free_port

_END_SECONDS = 60.0


class _EndEvent:
    """Event that implements `Ending` for `keep_running`."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.wait = self._event.wait
        self.end = self._event.set

    @property
    def due(self) -> bool:
        return self._event.is_set()


class _RunningServer:
    """Server and the thread that keeps the server running."""

    def __init__(self, spec: ServerSpec, called: str, port: int, key: str) -> None:
        self._spec, self._port, self._key, self._ending = spec, port, key, _EndEvent()
        self.called = called
        self.problem: str | None = None
        """Reason for a server that failed permanently, otherwise None."""
        self._thread = threading.Thread(target=self._keep, name="megappo-reward-server", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        try:
            keep_running(self._start, self._ending, self._spec.settings.health_timeout_seconds)
        except (RunError, OSError) as error:
            self.problem = str(error)

    def _start(self, restarts: int) -> Server:
        return start_server(self._spec, 0, 0, restarts + 1, port=self._port, key=self._key)

    def end(self) -> None:
        """Request the end of the server. `wait` returns after all its processes have ended."""
        self._ending.end()

    def wait(self) -> None:
        self._thread.join(_END_SECONDS)


@dataclass(frozen=True)
class OwnServers:
    """Servers that the run starts for its rewards."""

    places: Mapping[str, ServerPlace] = field(default_factory=dict)
    """Places of the servers by the names of their judges or of the model. All ranks have the same places."""
    running: Sequence[_RunningServer] = ()
    """Servers that this rank has started."""

    def check(self) -> None:
        """Raise RunError if a server of this rank has failed permanently."""
        for server in self.running:
            if server.problem is not None:
                raise RunError(f"{server.called}'s server cannot be kept running: {server.problem}")

    def close(self) -> None:
        """End the servers of this rank and all their processes."""
        for server in self.running:
            server.end()
        for server in self.running:
            server.wait()


@dataclass(frozen=True)
class OwnServer:
    """Server to start."""

    settings: OwnServerSettings
    key: str
    """Dotted key of the server's settings."""
    called: str
    """Readable name of the server's user."""
    spec: Callable[[int], ServerSpec]
    """Function that returns the specification. Its argument is the number of training ranks on the server's machine.
    Only the rank that starts the server calls the function. Raises RunError."""
    path: str = ""
    """Path after the server's address in requests."""


def start_servers(servers: Mapping[str, OwnServer], runtime: Runtime) -> OwnServers:
    """Start servers without waiting for them, each on the first rank of its machine. The call is a collective of the
    world.

    Raises ValueError on every rank if a server cannot be started.
    """
    hosts = all_gather_objects(machine_here())
    mine, machines = hosts[runtime.rank], list(dict.fromkeys(hosts))
    address = address_among(hosts, mine) if len(machines) > 1 else "127.0.0.1"

    def started() -> tuple[dict[str, ServerPlace], list[_RunningServer]]:
        places, running = {}, []
        for name, server in servers.items():
            own, key = server.settings, server.key
            if own.machine >= len(machines):
                raise RunError(f"{key}.machine is {own.machine}, must be below {len(machines)} (number of machines)")
            if hosts.index(machines[own.machine]) != runtime.rank:
                continue
            spec = server.spec(hosts.count(mine))
            host = own.host or address
            reached = address if host in EVERYWHERE else host
            spec, port, secret = replace(spec, host=host, address=reached), free_port(host), secrets.token_hex(16)
            url = f"http://{named_in_url(reached)}:{port}{server.path}"
            places[name] = ServerPlace(url, spec.called, secret, own.start_timeout_seconds)
            running.append(_RunningServer(spec, server.called, port, secret))
        return places, running

    # Raises on every rank if one rank fails, so that no rank waits in the following gather.
    places, running = agreed(started, (RunError, OSError))
    everywhere = {name: place for of_rank in all_gather_objects(places) for name, place in of_rank.items()}
    return OwnServers(everywhere, running)


def own_cores() -> tuple[int, ...]:
    """Return the CPU cores that a server can use on this machine."""
    return tuple(sorted(os.sched_getaffinity(0)))


def own_gpus(config: Config, server: OwnServerSettings, key: str, local_ranks: int) -> tuple[int, ...]:
    """Return the GPUs of a server by their numbers among the GPUs visible to this process.

    `local_ranks` is the number of training ranks on the machine. Raises RunError if there are too few GPUs, or if
    trainers or rollout servers use the GPUs.
    """
    first = local_ranks if server.first_device is None else server.first_device
    last, count = first + server.ranks - 1, torch.cuda.device_count()
    placed = f"{key} would use the GPUs {first} to {last}"
    if last >= count:
        raise RunError(f"{placed}, but a rank sees {count} GPUs; start fewer ranks, or set first_device or machine")
    if first < local_ranks:
        raise RunError(f"{placed}, but {local_ranks} ranks train there; set first_device to {local_ranks} or more")
    rollout = config.rollout.servers
    if config.rollout.has_servers and rollout.placement == "disaggregated" and not rollout.urls and not server.machine:
        begin = local_ranks if rollout.first_device is None else rollout.first_device
        end = begin + (rollout.engines or 1) * rollout.node_ranks
        if first < end and last >= begin:
            raise RunError(f"{placed}, but rollout servers use {begin} to {end - 1}; set first_device to {end}")
    return tuple(range(first, last + 1))
