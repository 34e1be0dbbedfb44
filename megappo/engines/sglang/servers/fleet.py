"""The servers of a run: their number, their devices, and the rank that manages each server."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from megappo.engines.sglang.client import Endpoint, ServerFailure, is_alive, takes, takes_any_key
from megappo.engines.sglang.servers.gpus import server_gpus
from megappo.engines.sglang.servers.inspection import (
    check_hooks,
    check_lengths,
    check_room,
    check_routing,
    check_sampling,
    check_stack,
    what_it_says,
)
from megappo.engines.sglang.servers.rendezvous import MultiNodeRendezvous, ServerPart
from megappo.engines.sglang.servers.server import EngineError, Server, start_server
from megappo.engines.sglang.servers.spec import ServerSpec, unheard_variables
from megappo.engines.sglang.version import is_tried
from megappo.errors import RunError
from megappo.network.interfaces import ANY_PORT
from megappo.network.keys import key_of
from megappo.network.store import address_towards, is_address, is_loopback, listening_problem
from megappo.observe.terminal.messages import show_message
from megappo.reshard.feeding import Feeding
from megappo.runtime.holder import boot_id
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import agreed, all_gather_objects
from megappo.runtime.waiting import wait_until

T = TypeVar("T")
KEY_VARIABLE = "MEGAPPO_SGLANG_API_KEY"
_RETRY_SECONDS = 1.0
_SILENT_SECONDS = 5.0
EVERYWHERE = ("0.0.0.0", "::")


def key_problem(endpoint: Endpoint, timeout_seconds: float) -> str | None:
    """Return the reason why a server of `rollout.servers.urls` does not accept our key, with the remedy, or None.

    The key is sent only if the server rejects a random key. Raises ServerFailure if there is no response.
    """
    name = f"{endpoint.name} of rollout.servers.urls"
    if endpoint.key and takes_any_key(endpoint, timeout_seconds):
        return (
            f"{name} accepts any key, so the server was started without a key, or is another program; start the "
            f"server with `megappo serve`, or unset {KEY_VARIABLE} if the server requires no key"
        )
    if takes(endpoint, timeout_seconds):
        return None
    if not endpoint.key:
        return f"{name} requires a key, and {KEY_VARIABLE} is empty; export the key of the server"
    return f"{name} rejects the key in {KEY_VARIABLE}; set {KEY_VARIABLE} to the key of the server"


def by_server(mine: Mapping[int, T]) -> dict[int, T]:
    """Merge the values of all ranks into one dictionary by server number. This is a collective."""
    return {index: fact for of_rank in all_gather_objects(dict(mine)) for index, fact in of_rank.items()}


def address_among(hosts: Sequence[tuple[str, str]], mine: tuple[str, str]) -> str:
    """Return the address of this machine on the route to the other machines. This is a collective of the world.
    `hosts` has the `machine_here` of each rank."""
    towards_first = agreed(lambda: address_towards(os.environ["MASTER_ADDR"], ANY_PORT), (OSError,))
    others = [a for a, machine in zip(all_gather_objects(towards_first), hosts, strict=True) if machine != hosts[0]]
    if mine == hosts[0]:
        return agreed(lambda: address_towards(others[0], ANY_PORT), (OSError,))
    return agreed(lambda: towards_first)  # collective with the `agreed` of the first machine's ranks


def machine_here() -> tuple[str, str]:
    """Return the identity of this machine: host name and boot id."""
    return socket.gethostname(), boot_id()


@dataclass(frozen=True)
class Started:
    """Result of starting the servers of a rank, shared with all ranks."""

    endpoints: tuple[Endpoint, ...] = ()
    """Addresses of new servers, and of servers that must be treated as new."""
    restarts: int = 0
    error: str | None = None


class Fleet:
    """The servers that this rank manages. The number may be 0."""

    def __init__(self, spec: ServerSpec, runtime: Runtime) -> None:
        """Start the servers of this rank without waiting. This is a collective of the world."""
        self._settings, self._runtime = spec.settings, runtime
        runtime.release_cached_memory()
        hosts, cores = zip(*all_gather_objects((machine_here(), os.sched_getaffinity(0))), strict=True)
        self._cores_here = {c for host, of_rank in zip(hosts, cores, strict=True) if host == hosts[runtime.rank]
                            for c in of_rank}  # fmt: skip
        self.feeding = Feeding(
            hosts,
            self._settings.tensor_parallel,
            colocated=self._settings.placement == "colocated",
            on_cuda=runtime.on_cuda,
            sliced=self._settings.takes_slices and is_tried(),
            anywhere=self._settings.reached_from_everywhere,
            nodes=self._settings.nodes,
        )
        self._ranks_here = hosts.count(hosts[runtime.rank])
        self._external = dict(enumerate(self._settings.urls))
        self._count = self._settings.count_servers(runtime.world_size, on_cuda=runtime.on_cuda)
        places = {i: self.feeding.starters(i) for i in range(self._count)}
        self._mine = [i for i, starters in places.items() if starters[0] == runtime.rank]
        self._nodes = {i: starters.index(runtime.rank) for i, starters in places.items() if runtime.rank in starters}
        """Part number of this rank, by server."""
        self.servers: dict[int, Server] = {}
        self.parts: dict[int, Server] = {}
        """Parts other than the first, of servers on several machines. Other ranks own the first parts."""
        self._starts = dict.fromkeys(self._mine, 0)
        self._restarts = dict.fromkeys(self._nodes, 0)
        host, address = self._interface(hosts)
        self.spec = replace(spec, host=host, address=address)
        """Common specification of all servers."""
        self._specs = agreed(lambda: {i: self._placed(i) for i in self._nodes if not self._external}, (RunError,))
        """Specifications of the servers and parts of this rank, also used for restarts."""
        unheard = unheard_variables(os.environ)
        if unheard and runtime.rank == 0 and not self._external:
            show_message(
                f"the SGLang servers do not receive {', '.join(unheard)}, which {'are' if unheard[1:] else 'is'} "
                "set in the environment; set variables of the servers in rollout.servers.environment"
            )
        self._rendezvous = self._meet() if self._settings.nodes > 1 else {}
        self._start(list(self._specs))

    def _interface(self, hosts: Sequence[tuple[str, str]]) -> tuple[str, str]:
        """Return the listening interface of the servers on this machine, and the address for other machines. This is
        a collective."""
        host, mine = self._settings.host, hosts[self._runtime.rank]
        if self._external or len(set(hosts)) == 1:
            return host or "127.0.0.1", ""
        agreed(lambda: self._check_host(host), (RunError,))
        own = address_among(hosts, mine)
        return host or own, host if host and host not in EVERYWHERE else own

    def _check_host(self, host: str | None) -> None:
        """Raise RunError if an interface is not reachable from several machines."""
        if host is None or host in EVERYWHERE or not self._nodes:
            return
        problem = "which is reachable only from this machine" if is_loopback(host) else listening_problem(host, 0)
        if problem is not None:
            raise RunError(
                f"rollout.servers.host is {host} ({problem}), and the trainers use several machines; remove the "
                "setting, so that servers listen on the interface of the route to the other machines"
            )

    def _meet(self) -> dict[int, MultiNodeRendezvous]:
        """Connect each server and part of this rank with its other parts. This is a collective."""
        address, patience = self.spec.address or self.spec.host, self._settings.start_timeout_seconds
        first = agreed(
            lambda: {i: MultiNodeRendezvous.host(address, 0, self._settings) for i in self._mine}, (OSError,)
        )
        # Ports are exchanged at this point, so that every first part listens before another part connects.
        meetings = by_server({index: (address, rendezvous.port) for index, rendezvous in first.items()})

        def join(index: int, node: int) -> MultiNodeRendezvous:
            return MultiNodeRendezvous.join(*meetings[index], node, self._settings, patience)

        rendezvous_by_server = first | agreed(
            lambda: {i: join(i, node) for i, node in self._nodes.items() if node}, (ServerFailure,)
        )
        addresses = all_gather_objects(address)
        for index, rendezvous in rendezvous_by_server.items():
            found = {addresses[rank] for rank in self.feeding.starters(index)}
            if all(map(is_address, found)):
                rendezvous.peers = frozenset({"127.0.0.1", *found})
        return rendezvous_by_server

    def _start(self, indices: Iterable[int]) -> None:
        """Start these servers and parts. First parts start before other parts, which wait for an announcement. Raises
        ServerFailure if an announcement does not arrive."""
        for index in sorted(indices, key=lambda i: self._nodes[i]):
            spec, rank, part = self._specs[index], self._runtime.rank, None
            if index in self._rendezvous:
                part = ServerPart(self._rendezvous[index], self._restarts[index])
                part.begin()
            if self._nodes[index]:
                self.parts[index] = start_server(spec, index, rank, 1, part=part)
            else:
                self._starts[index] += 1
                self.servers[index] = start_server(spec, index, rank, self._starts[index], part=part)

    def _placed(self, index: int) -> ServerSpec:
        """Return the specification with the GPUs or CPU cores of this server, or of the part of this rank."""
        problem = self.feeding.problem(index)
        if problem is not None:
            raise RunError(
                f"rollout.servers.nodes is {self._settings.nodes}, but {problem}; start the trainers on that number "
                "of machines, or set nodes to the number of machines of one server"
            )
        if self._runtime.on_cuda:
            gpus = server_gpus(self._settings, index, self._runtime.device.index, self._ranks_here)
            return replace(self.spec, devices=gpus, job_cores=tuple(sorted(self._cores_here)), seed=index)
        cores = sorted(self._cores_here)
        share = max(1, len(cores) // self._count)
        own = cores[index * share : (index + 1) * share] or cores
        return replace(self.spec, cores=tuple(own), job_cores=tuple(cores), seed=index)

    # Operations of a rank on its servers. Every method returns the results for all ranks.

    def start_all(self) -> Started:
        """Wait until the servers of this rank respond. This is a collective if servers use several machines.

        A server that fails to start is started once more, because another program may have taken its port. A
        persistent error occurs again.
        """
        if self._external:
            return self._each(self._mine, self._await_external)
        mine = set(self._mine)
        return self._bring_up(set(), mine, starting=mine, most_starts=1)

    def restart_dead(self, suspects: Iterable[int]) -> Started:
        """Restart servers that do not respond, and wait for the restarted servers. A collective as `start_all`.

        `suspects` are servers with any failure. A server that dies during its start is restarted up to `max_restarts`
        times.
        """
        known = set(suspects)
        if self._external:
            return self._each([index for index in self._mine if index in known], self._await_external)
        gone = {index for index, server in (self.servers | self.parts).items() if not server.running}
        silent = self._failures([i for i in self._mine if i in known - gone], self._check_health)
        lost, _ = self._agreed(gone | silent.keys())
        mine = {index for index in self._mine if index in known | lost}
        for index in (
            mine - lost
        ):  # counts as a new start, because its broadcast group may be broken and is never used again
            self._starts[index] += 1
            server = self.servers[index]
            server.endpoint = replace(server.endpoint, starts=self._starts[index])
        return self._bring_up(lost, mine, starting=lost, most_starts=None)

    def _failures(self, indices: Iterable[int], action: Callable[[int], None]) -> dict[int, str]:
        """Apply an action to these servers in parallel and return the reasons of failed servers."""

        def failure(index: int) -> str | None:
            try:
                action(index)
            except ServerFailure as problem:
                return str(problem)
            return None

        chosen = list(indices)
        with ThreadPoolExecutor(max(1, len(chosen))) as pool:
            return {i: reason for i, reason in zip(chosen, pool.map(failure, chosen), strict=True) if reason}

    def _agreed(self, lost: set[int], error: str | None = None) -> tuple[set[int], str | None]:
        """Return the servers with a lost part on any rank, and an error of any rank. A server on one machine concerns
        only its own rank."""
        facts = all_gather_objects((lost, error)) if self._settings.nodes > 1 else [(lost, error)]
        return {i for of_rank, _ in facts for i in of_rank}, next((e for _, e in facts if e), None)

    def _check_health(self, index: int) -> None:
        """Raise ServerFailure if a server does not respond. A server that has released memory counts as failed,
        because it must not receive requests."""
        server = self.servers[index]
        if server.released or not is_alive(server.endpoint, self._settings.health_timeout_seconds):
            raise ServerFailure(f"{server.endpoint.name} does not answer")

    def _bring_up(self, lost: set[int], mine: set[int], *, starting: set[int], most_starts: int | None) -> Started:
        """Restart the lost servers on this rank, wait for its starting servers, and check the servers in `mine`.
        Servers in `mine` that still respond receive weights again.

        A server that fails during the restart is restarted again. `most_starts` is the maximum number of restarts in
        this call. A failure after the last restart raises an error. With None, the limit is `max_restarts`.
        """
        endpoints, restarts, waiting = dict[int, Endpoint](), 0, mine
        for starts in itertools.count():
            failures, error = dict[int, str](), self._restart(lost)
            restarts += len(lost & mine)
            if error is None:
                try:
                    failures = self._failures(waiting, partial(self._take_in, starting=starting, endpoints=endpoints))
                except (EngineError, OSError) as problem:
                    error = str(problem)
            if failures and starts == most_starts:
                error = next(iter(failures.values()))
            lost, error = self._agreed(set(failures), error)
            if error is not None:
                return Started(error=error)
            if not lost:
                break
            waiting, starting = mine & lost, lost
        return Started(tuple(endpoints[index] for index in sorted(endpoints)), restarts)

    def _take_in(self, index: int, *, starting: set[int], endpoints: dict[int, Endpoint]) -> None:
        """Check a server. Wait for the server first if it is `starting`. Raises as `_taken_in`."""
        if index in starting:
            self.servers[index].wait_ready()
        endpoints[index] = self._taken_in(self.servers[index].endpoint)

    def _restart(self, lost: set[int]) -> str | None:
        """Restart the parts of these servers on this rank, and return the reason of a failure."""
        again = sorted(lost & self._nodes.keys())
        try:
            for index in again:
                self._count_restart(index)
            self._stop([s for index in again for s in (self.servers.get(index), self.parts.get(index)) if s])
            self._start(again)
        except (ServerFailure, EngineError, OSError) as error:
            return str(error)
        return None

    def _count_restart(self, index: int) -> None:
        server = self.servers.get(index) or self.parts[index]
        if self._restarts[index] >= self._settings.max_restarts:
            raise EngineError(
                f"server {index} failed after {self._restarts[index]} restarts, "
                f"rollout.servers.max_restarts is {self._settings.max_restarts}; {server.why_ended}"
            )
        self._restarts[index] += 1

    def _each(self, indices: list[int], action: Callable[[int], Endpoint]) -> Started:
        if not indices:
            return Started()
        try:
            with ThreadPoolExecutor(len(indices)) as pool:
                return Started(tuple(pool.map(action, indices)))
        except (ServerFailure, EngineError, OSError) as error:
            return Started(error=str(error))

    def _taken_in(self, endpoint: Endpoint) -> Endpoint:
        """Check a server after its start. Raises EngineError if the run cannot use the server."""
        said = what_it_says(endpoint, self._settings.health_timeout_seconds)
        check_room(endpoint.name, said, self.spec.cache)
        check_lengths(endpoint.name, said, self.spec.longest_tokens)
        check_sampling(endpoint.name, said)
        check_hooks(endpoint.name, said, has_least_tokens=self.spec.has_least_tokens)
        if self._external:
            check_stack(endpoint.name, said, by_nccl=self._runtime.on_cuda)
            check_routing(endpoint.name, said, wanted=self.spec.returns_routing)
        return endpoint

    def _await_external(self, index: int) -> Endpoint:
        """Wait until an external server responds, and check the server. If the server ends during the check, the
        method waits again."""
        for _ in range(self._settings.max_restarts):
            endpoint = self._reach_external(index)
            with suppress(ServerFailure):
                return self._taken_in(endpoint)
        return self._taken_in(self._reach_external(index))

    def _reach_external(self, index: int) -> Endpoint:
        """Wait until an external server responds."""
        self._starts[index] += 1
        key = key_of(KEY_VARIABLE)
        endpoint = Endpoint(index, self._external[index].rstrip("/"), key, self._runtime.rank, self._starts[index])
        patience, health = self._settings.start_timeout_seconds, self._settings.health_timeout_seconds
        silent, told = time.monotonic() + _SILENT_SECONDS, list[str]()

        def answers() -> bool:
            try:
                if problem := key_problem(endpoint, health):
                    raise EngineError(problem)
                return is_alive(endpoint, health)
            except ServerFailure as failure:
                if not told and time.monotonic() > silent:
                    told.append(str(failure))
                    show_message(
                        f"{failure}: there is no server yet, and the run waits for start_timeout_seconds "
                        f"{patience:g}; start the server (megappo serve), or fix rollout.servers.urls"
                    )
                return False

        if not wait_until(answers, patience, every_seconds=_RETRY_SECONDS):
            raise ServerFailure(
                f"{endpoint.name} of rollout.servers.urls returned no healthy response within start_timeout_seconds "
                f"{patience:g}; start the server, or check its key in {KEY_VARIABLE}"
            )
        return endpoint

    def each_own(self, endpoints: Sequence[Endpoint], action: Callable[[Server], None]) -> dict[int, str]:
        """Apply an action to the servers in `endpoints` that this rank started. Returns the problems of all ranks by
        server. This is a collective."""
        failed = {}
        for endpoint in endpoints:
            if endpoint.index in self.servers:
                try:
                    action(self.servers[endpoint.index])
                except ServerFailure as failure:
                    failed[endpoint.index] = str(failure)
        return by_server(failed)

    def close(self) -> None:
        """End all servers and parts of this rank in parallel."""
        self._stop([*self.servers.values(), *self.parts.values()])
        self.servers, self.parts = {}, {}

    def _stop(self, servers: Sequence[Server]) -> None:
        with ThreadPoolExecutor(max(1, len(servers))) as pool:
            list(pool.map(Server.stop, servers))
