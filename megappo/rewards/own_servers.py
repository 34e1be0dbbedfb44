"""Servers that a run starts for its rewards: which rank starts each, where it runs, and how it is ended."""

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
    """An event that `keep_running` takes as `Ending`."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.wait = self._event.wait
        self.end = self._event.set

    @property
    def due(self) -> bool:
        return self._event.is_set()


class _Kept:
    """A server and the thread that keeps it running."""

    def __init__(self, spec: ServerSpec, called: str, port: int, key: str) -> None:
        self._spec, self._port, self._key, self._ending = spec, port, key, _EndEvent()
        self.called = called
        self.problem: str | None = None
        """Reason why the server was given up; None: it was not."""
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
        """Tell the server to end; `wait` returns when all its processes are gone."""
        self._ending.end()

    def wait(self) -> None:
        self._thread.join(_END_SECONDS)


@dataclass(frozen=True)
class OwnServers:
    """The servers of a run's own rewards."""

    places: Mapping[str, ServerPlace] = field(default_factory=dict)
    """Places of the servers, by the names of the judges or the model that they serve; the same on all ranks."""
    kept: Sequence[_Kept] = ()
    """Servers that this rank has started."""

    def check(self) -> None:
        """Raise RunError where a server of this rank was given up."""
        for kept in self.kept:
            if kept.problem is not None:
                raise RunError(f"{kept.called}'s server cannot be kept running: {kept.problem}")

    def close(self) -> None:
        """End this rank's servers and all their processes."""
        for kept in self.kept:
            kept.end()
        for kept in self.kept:
            kept.wait()


@dataclass(frozen=True)
class OwnServer:
    """A server to start."""

    settings: OwnServerSettings
    key: str
    """Dotted key of the server's settings."""
    called: str
    """Whose server it is, for people."""
    spec: Callable[[int], ServerSpec]
    """Makes the specification, given the number of ranks that train on the server's machine; called on the rank that
    starts it. Raises RunError."""
    path: str = ""
    """Path behind the server's address in requests."""


def start_servers(wanted: Mapping[str, OwnServer], runtime: Runtime) -> OwnServers:
    """Start servers without waiting for them, each on the first rank of its machine; a collective of the world. Raises
    ValueError on every rank where one cannot be started."""
    hosts = all_gather_objects(machine_here())
    mine, machines = hosts[runtime.rank], list(dict.fromkeys(hosts))
    address = address_among(hosts, mine) if len(machines) > 1 else "127.0.0.1"

    def started() -> tuple[dict[str, ServerPlace], list[_Kept]]:
        places, kept = {}, []
        for name, server in wanted.items():
            own, key = server.settings, server.key
            if own.machine >= len(machines):
                raise RunError(f"{key}.machine is {own.machine}, the trainers have {len(machines)}, from 0 on")
            if hosts.index(machines[own.machine]) != runtime.rank:
                continue
            spec = server.spec(hosts.count(mine))
            host = own.host or address
            reached = address if host in EVERYWHERE else host
            spec, port, secret = replace(spec, host=host, address=reached), free_port(host), secrets.token_hex(16)
            url = f"http://{named_in_url(reached)}:{port}{server.path}"
            places[name] = ServerPlace(url, spec.called, secret, own.start_timeout_seconds)
            kept.append(_Kept(spec, server.called, port, secret))
        return places, kept

    # Raises on every rank where one fails, so that none waits for it in the gather behind.
    places, kept = agreed(started, (RunError, OSError))
    everywhere = {name: place for of_rank in all_gather_objects(places) for name, place in of_rank.items()}
    return OwnServers(everywhere, kept)


def own_cores() -> tuple[int, ...]:
    """CPU cores that a server may use here."""
    return tuple(sorted(os.sched_getaffinity(0)))


def own_gpus(config: Config, server: OwnServerSettings, key: str, ranks_here: int) -> tuple[int, ...]:
    """GPUs of a server by their number among those that this process sees; `ranks_here` train on the machine. Raises
    RunError where there are too few, or others use them."""
    first = ranks_here if server.first_device is None else server.first_device
    last, count = first + server.ranks - 1, torch.cuda.device_count()
    words = f"{key} would stand on the GPUs {first} to {last}"
    if last >= count:
        raise RunError(f"{words}, but a rank sees {count} here; start fewer ranks, or set first_device or machine")
    if first < ranks_here:
        raise RunError(f"{words}, where {ranks_here} ranks train; set first_device to {ranks_here} or more")
    rollout = config.rollout.servers
    if config.rollout.has_servers and rollout.placement == "disaggregated" and not rollout.urls and not server.machine:
        begin = ranks_here if rollout.first_device is None else rollout.first_device
        end = begin + (rollout.engines or 1) * rollout.node_ranks
        if first < end and last >= begin:
            raise RunError(
                f"{words}, where the servers of the rollout stand, on {begin} to {end - 1}; set first_device to {end}"
            )
    return tuple(range(first, last + 1))
