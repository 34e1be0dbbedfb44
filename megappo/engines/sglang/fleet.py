"""The servers of a run: which there are, on which devices, and which rank looks after which."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from megappo.engines.sglang.client import Endpoint, ServerFailure, is_alive
from megappo.engines.sglang.gpus import server_gpus
from megappo.engines.sglang.inspection import check_room, check_routing, check_stack, what_it_says
from megappo.engines.sglang.server import EngineError, Server, ServerSpec, start_server
from megappo.errors import RunError
from megappo.reshard.feeding import Feeding
from megappo.runtime.objects import agreed, of_all_ranks
from megappo.runtime.process import Runtime
from megappo.runtime.sglang_slices import has_loader
from megappo.runtime.waiting import wait_until

KEY_VARIABLE = "MEGAPPO_SGLANG_API_KEY"
_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Started:
    """What a rank did for its servers; told to all ranks."""

    endpoints: tuple[Endpoint, ...] = ()
    """Of servers that are new, or must be treated as new."""
    restarts: int = 0
    error: str | None = None


class Fleet:
    """This rank's servers: none, one or several."""

    def __init__(self, spec: ServerSpec, runtime: Runtime) -> None:
        """Start this rank's servers without waiting for them; a collective of the world."""
        self._spec, self._settings, self._runtime = spec, spec.settings, runtime
        runtime.release_cached_memory()
        hosts = of_all_ranks((socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text()))
        self.feeding = Feeding(
            hosts,
            self._settings.tensor_parallel,
            colocated=self._settings.placement == "colocated",
            on_cuda=runtime.on_cuda,
            sliced=self._settings.takes_slices and has_loader(),
            anywhere=self._settings.reached_from_everywhere,
        )
        self._ranks_here = hosts.count(hosts[runtime.rank])
        self._external = dict(enumerate(self._settings.urls))
        self._count = self._settings.count(runtime.world_size, on_cuda=runtime.on_cuda)
        self._mine = [i for i in range(self._count) if self.feeding.sender(i) == runtime.rank]
        self.servers: dict[int, Server] = {}
        self._starts = dict.fromkeys(self._mine, 0)
        self._restarts = dict.fromkeys(self._mine, 0)
        self._specs = agreed(lambda: {i: self._placed(i) for i in self._mine if not self._external}, (RunError,))
        """Of own servers, also when they are started again."""
        for index in self._specs:
            self._start(index)

    @property
    def can_sleep(self) -> bool:
        """Whether the servers can give memory away that the trainers want."""
        return self._spec.memory_saver

    @property
    def returns_routing(self) -> bool:
        """Whether the servers say which experts computed a token."""
        return self._spec.returns_routing

    def _start(self, index: int) -> None:
        self._starts[index] += 1
        self.servers[index] = start_server(self._specs[index], index, self._runtime.rank, self._starts[index])

    def _placed(self, index: int) -> ServerSpec:
        """The specification with this server's devices or cores."""
        if self._runtime.on_cuda:
            gpus = server_gpus(self._settings, index, self._runtime.device.index, self._ranks_here)
            return replace(self._spec, devices=gpus, seed=index)
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // self._count)
        own = cores[index * share : (index + 1) * share] or cores
        return replace(self._spec, cores=tuple(own), seed=index)

    # What a rank does for its servers; every method returns what all ranks must know

    def start_all(self) -> Started:
        """Wait until this rank's servers answer."""
        return self._each(self._mine, self._await_first)

    def restart_dead(self, suspects: Iterable[int]) -> Started:
        """Start again what does not answer, and wait for it; `suspects` failed in some way."""
        suspects = set(suspects)
        gone = {i for i in self._mine if i in self.servers and not self.servers[i].running}
        return self._each([i for i in self._mine if i in suspects | gone], self._recover)

    def _each(self, indices: list[int], action: Callable[[int], Started]) -> Started:
        if not indices:
            return Started()
        try:
            with ThreadPoolExecutor(len(indices)) as pool:
                done = list(pool.map(action, indices))
        except (ServerFailure, EngineError) as error:
            return Started(error=str(error))
        return Started(tuple(e for d in done for e in d.endpoints), sum(d.restarts for d in done))

    def _await_first(self, index: int) -> Started:
        if self._external:
            return self._taken_in(self._await_external(index))
        try:
            self.servers[index].wait_ready()
        except ServerFailure:
            # Another program may have taken the port in the meantime; a real fault shows the second time.
            return self._restart(index)
        return self._taken_in(self.servers[index].endpoint)

    def _taken_in(self, endpoint: Endpoint, restarts: int = 0) -> Started:
        """A server that has just come up, looked at once."""
        said = what_it_says(endpoint, self._settings.health_timeout_seconds)
        check_room(endpoint.name, said, self._spec.cache)
        if self._external:
            check_stack(endpoint.name, said, by_nccl=self._runtime.on_cuda)
            check_routing(endpoint.name, said, wanted=self._spec.returns_routing)
        return Started((endpoint,), restarts)

    def _recover(self, index: int) -> Started:
        """A server that still answers is given weights again; one that does not is replaced, and one that failed when
        part of its memory was given away, as nothing can be asked of it."""
        if self._external:
            return self._taken_in(self._await_external(index))
        server = self.servers[index]
        if server.running and not server.released and is_alive(server.endpoint, self._settings.health_timeout_seconds):
            self._starts[index] += 1  # a broadcast group with it may be broken: never used again
            server.endpoint = replace(server.endpoint, starts=self._starts[index])
            return Started((server.endpoint,))
        return self._restart(index)

    def _restart(self, index: int) -> Started:
        if self._restarts[index] >= self._settings.max_restarts:
            raise EngineError(
                f"server {index} failed after {self._restarts[index]} restarts, "
                f"rollout.sglang.max_restarts is {self._settings.max_restarts}; "
                f"{self.servers[index].log} ends with: {self.servers[index].tail()}"
            )
        self._restarts[index] += 1
        self.servers[index].stop()
        self._start(index)
        self.servers[index].wait_ready()
        return self._taken_in(self.servers[index].endpoint, restarts=1)

    def _await_external(self, index: int) -> Endpoint:
        """Wait until a server that somebody else starts answers."""
        self._starts[index] += 1
        key = os.environ.get(KEY_VARIABLE, "")
        endpoint = Endpoint(index, self._external[index].rstrip("/"), key, self._runtime.rank, self._starts[index])
        patience, health = self._settings.start_timeout_seconds, self._settings.health_timeout_seconds
        if not wait_until(lambda: is_alive(endpoint, health), patience, every_seconds=_RETRY_SECONDS):
            raise ServerFailure(
                f"{endpoint.name} of rollout.sglang.urls gave no healthy answer within start_timeout_seconds "
                f"{patience:g}; start it, or check its key in {KEY_VARIABLE}"
            )
        return endpoint

    def close(self) -> None:
        """End this rank's servers, all at once."""
        if self.servers:
            with ThreadPoolExecutor(len(self.servers)) as pool:
                list(pool.map(Server.stop, self.servers.values()))
        self.servers = {}
