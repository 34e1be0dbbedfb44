"""A group of SGLang servers as one engine, driven by all ranks of the trainer together.

Every rank sends its prompts to any server. The rank that started a server (its sender) also restarts the server after
a failure and sets its weight version. `feeding` selects the ranks that send weights to the server. Ranks agree on
failures, so that all ranks raise the same error or none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from megappo.config import Config
from megappo.config.sections.engine import EngineCapabilities, ServerSettings
from megappo.engines.base import EngineBase, SyncError
from megappo.engines.protocol import (
    CacheUse,
    Completion,
    EngineUsage,
    GenerateRequest,
    PauseMode,
    SamplingParams,
    SyncReport,
)
from megappo.engines.sglang.client import Endpoint, failures_of
from megappo.engines.sglang.requests.aborting import abort_servers
from megappo.engines.sglang.requests.dispatch import Dispatcher
from megappo.engines.sglang.requests.generation import RequestLimits
from megappo.engines.sglang.servers.fleet import Fleet, Started, by_server
from megappo.engines.sglang.servers.server import CACHES, WEIGHTS, EngineError, Server
from megappo.engines.sglang.servers.spec import ServerSpec
from megappo.engines.sglang.weights.buffers import SyncBuffers
from megappo.engines.sglang.weights.sync import ServerSync, SyncRun, SyncSeconds
from megappo.engines.sglang.weights.transport import BroadcastTransport, SharedTransport, Transport
from megappo.observe.terminal.messages import show_message
from megappo.reshard.slices import EngineShape, Receiver
from megappo.reshard.stream import WeightStream
from megappo.runtime.device import device_bytes
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import all_gather_objects
from megappo.runtime.watch.interrupts import NeverStop, Stop

_WATCH_SECONDS = 1.0
RECOVERIES_IN_VAIN = 3
"""Number of consecutive failures without an answer that end the run, because the remaining requests are the likely
cause."""


class SGLangEngine(EngineBase):
    """An `Engine` of several servers. All ranks call each method at the same time, except `submit`."""

    def __init__(self, fleet: Fleet, settings: ServerSettings, runtime: Runtime, stop: Stop | None = None) -> None:
        """Create the engine without waiting. Servers load in the background, and the first update waits for them."""
        super().__init__()
        self.fleet, self.settings, self._runtime = fleet, settings, runtime
        self._stop: Stop = stop if stop is not None else NeverStop()
        self._endpoints: list[Endpoint] = []
        self.current: set[int] = set()
        """Servers with the verified weights of `version`."""
        self._suspects: set[int] = set()
        """Servers that have failed since their last successful check."""
        self._transports: dict[tuple[int, int], Transport] = {}
        self._buffers = SyncBuffers()
        self._weights: WeightStream | None = None
        self.version = 0
        """Version of the weights. The version is 0 before the first update."""
        self._asleep = False
        limits = RequestLimits.of(settings, runtime.deadlines)
        self._dispatcher = Dispatcher(limits, lambda: self.on_tokens())
        self._restarts = self._recoveries_in_vain = 0
        self._attempts: list[SyncSeconds] = []
        """Durations of each attempt of the last weight update."""

    @property
    def capabilities(self) -> EngineCapabilities:  # type: ignore[override]
        """See `Engine.capabilities`."""
        return EngineCapabilities(
            routing=self.fleet.spec.returns_routing,
            prefix_cache=True,
            keeps_requests=self.settings.keeps_requests,
            separate_processes=True,
            concurrent=True,
        )

    @property
    def usage(self) -> EngineUsage:  # type: ignore[override]
        """See `Engine.usage`."""
        counted = self._dispatcher.cache
        return EngineUsage(self._restarts, {e.index: counted.get(e.index, CacheUse()) for e in self._endpoints})

    @property
    def replicas(self) -> list[int]:  # type: ignore[override]
        """Numbers of the servers that this rank manages."""
        return [endpoint.index for endpoint in self._own(self._endpoints)]

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """Addresses of the servers. Empty before the first update."""
        return tuple(self._endpoints)

    # Generation

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        """See `Engine.submit`."""
        if self._asleep or not self.version:
            state = "is asleep" if self._asleep else "has no complete set of weights"
            raise RuntimeError(f"the engine {state}; call update_weights first")
        return self._dispatcher.submit(requests, params)

    def poll(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
        """See `Engine.poll`. Requests of failed servers move to other servers, and the failed servers restart.

        With `weights_changed`, servers restart only after all running requests are answered, because all servers then
        receive the new weights.
        """
        deadline = time.monotonic() + wait_seconds
        while (left := deadline - time.monotonic()) > 0 and not self._stop.requested:
            if self._dispatcher.wait(min(left, _WATCH_SECONDS)):
                break
        reports = all_gather_objects((self._dispatcher.report(), self._stop.requested))
        if any(is_stopped for _, is_stopped in reports):
            self._stop.check()
        failures = {server: reason for report, _ in reports for server, reason in report.failures.items()}
        if refusals := [report.refusal for report, _ in reports if report.refusal]:
            raise EngineError(refusals[0])
        self._note_failures(failures)
        if any(report.answered for report, _ in reports):
            self._recoveries_in_vain = 0
        examples = [report.example for report, _ in reports if report.example]
        if not examples or len(self.current) == len(self._endpoints):
            return
        if not weights_changed or not any(report.running for report, _ in reports):
            self._require_progress(examples[0], failures)
            self._bring_up_to_date(self.version + 1 if weights_changed else None)

    def _require_progress(self, example: str, failures: Mapping[int, str]) -> None:
        """Raise EngineError if servers fail for the `RECOVERIES_IN_VAIN`th time without an answer."""
        self._recoveries_in_vain += 1
        if self._recoveries_in_vain == RECOVERIES_IN_VAIN:
            last = f"; the last failure: {next(iter(failures.values()))}" if failures else ""
            raise EngineError(
                f"servers failed {RECOVERIES_IN_VAIN} times in a row before any request was answered; the likely "
                f"cause is a remaining request, such as {example}, or the machines of all servers{last}"
            )

    def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`. A request that a server has rejected is rejected again, and then ends the run."""
        if mode == "keep":
            self._dispatcher.hold()
            order, patience = {"mode": self.settings.pause}, self.settings.sync_timeout_seconds
            self._note_failures(by_server(failures_of(self._own(self._ready), "/pause_generation", order, patience)))
            return
        self._dispatcher.abort()
        failures = abort_servers(self._dispatcher, self._own(self._ready), self.settings)
        failures |= by_server(self._dispatcher.report().failures)
        self._dispatcher.end_abort()
        self._note_failures(failures)

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Return a context that adds its duration to a phase of the current attempt of a weight update."""
        return self._attempts[-1].timed(phase)

    def _own(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        return [endpoint for endpoint in endpoints if endpoint.sender == self._runtime.rank]

    def _note_failures(self, reasons: Mapping[int, str]) -> None:
        """Exclude these servers until their next successful check, and report the reasons once."""
        self._suspects |= reasons.keys()
        self.current -= reasons.keys()
        if reasons:
            self._dispatcher.lose(reasons)
        if self._runtime.is_main:
            for reason in reasons.values():
                show_message(f"{reason}; the server will be restarted if necessary", warns=True)

    @property
    def _ready(self) -> list[Endpoint]:
        """Servers with the current weights, in the same order on every rank, which `RequestAssignment` needs."""
        return [endpoint for endpoint in self._endpoints if endpoint.index in self.current]

    # Weights

    def update_weights(self, named_tensors: WeightStream, version: int) -> SyncReport:
        """See `Engine.update_weights`. Uses the buckets of the stream. Raises SyncError if a server does not receive
        the weights."""
        self._weights = named_tensors
        self._dispatcher.begin_update(version)
        self._bring_up_to_date(version)
        self._asleep = False
        return SyncReport.gather([{**asdict(of_one), "transfer": of_one.transfer} for of_one in self._attempts])

    def _bring_up_to_date(self, newer_version: int | None = None) -> None:
        """Restart dead servers and send weights to outdated servers, until every server has this version or a newer
        one."""
        if newer_version is not None:
            self.version, self.current = newer_version, set()
        self._attempts = []
        problems: dict[int, str] = {}
        for _ in range(self.settings.sync_attempts):
            self._attempts.append(SyncSeconds())
            with self.timed("wake"):
                self._give_back()
                self._revive()
            stale = [e for e in self._endpoints if e.index not in self.current]
            problems = self._renew(stale) if stale else {}
            self.current |= {e.index for e in stale}
            self._note_failures(problems)
            if not problems:
                self._dispatcher.use(self._ready, self.version)
                return
        raise SyncError(
            f"weight sync {self.version} failed {self.settings.sync_attempts} times: "
            f"{'; '.join(problems[i] for i in sorted(problems))}"
        )

    def _revive(self) -> None:
        """Ensure that every server responds. Restart dead servers and store the new addresses. This is a collective."""
        mine = self.fleet.restart_dead(self._suspects) if self._endpoints else self.fleet.start_all()
        facts: list[Started] = all_gather_objects(mine)
        if errors := [fact.error for fact in facts if fact.error]:
            raise EngineError(f"the servers cannot be started: {errors[0]}")
        fresh = {endpoint.index: endpoint for fact in facts for endpoint in fact.endpoints}
        known = {endpoint.index: endpoint for endpoint in self._endpoints}
        self._restarts += sum(fact.restarts for fact in facts)
        self.current -= fresh.keys()
        self._endpoints = [(known | fresh)[index] for index in sorted(known | fresh)]
        self._suspects = set()

    def _renew(self, stale: Sequence[Endpoint]) -> dict[int, str]:
        """Make one attempt to update servers to this version. Returns the problems by server, the same on every rank.

        On the GPUs of the trainer, the memory of the key-value cache is allocated last, after the buckets are free.
        """
        if not self.fleet.spec.memory_saver:
            return self._sync(stale)

        def make_ready(server: Server) -> None:
            server.release(CACHES)  # for a server that has just started; a sleeping server has released its caches
            server.resume(WEIGHTS)

        with self.timed("wake"):
            problems = self.fleet.each_own(stale, make_ready)
        problems |= self._sync([endpoint for endpoint in stale if endpoint.index not in problems])
        with self.timed("wake"):
            self._give_back()
            synced = [endpoint for endpoint in stale if endpoint.index not in problems]
            return problems | self.fleet.each_own(synced, lambda server: server.resume(CACHES))

    def _sync(self, stale: Sequence[Endpoint]) -> dict[int, str]:
        """Send the weights. Returns the problems by server, the same on every rank."""
        weights, rank = self._weights, self._runtime.rank
        assert weights is not None
        given = self.settings
        shape = EngineShape(weights.arch, given.tensor_parallel, given.expert_parallel, given.data_parallel_attention)
        feeders = {e.index: self.fleet.feeding.feeders(e.index, weights.holdings.grid) for e in stale}
        mine = [
            ServerSync(e, self._transport(e, shape), feeders[e.index], rank)
            for e in stale
            if rank == e.sender or any(receiver.rank == rank for receiver in feeders[e.index])
        ]
        run = SyncRun(mine, shape, given.sync_timeout_seconds, given.verify, self._attempts[-1], given.pause)
        run.begin()
        run.give_up(by_server(run.problems))  # nothing is sent before all sessions are open
        self._send(run, weights, [receiver for e in stale for receiver in feeders[e.index]])
        run.finish(self.version)
        return by_server(run.problems)

    def _send(self, run: SyncRun, weights: WeightStream, receivers: Sequence[Receiver]) -> None:
        """Send all buckets to these receivers, and then load the buckets into the servers."""
        shared = self.fleet.feeding.shares_memory
        # A rank receives the data for several servers once. With shared memory, one copy serves all ranks.
        wanted = dict.fromkeys(receiver._replace(rank=0) if shared else receiver for receiver in receivers)
        delivery = weights.delivery(list(wanted), shared=shared)
        buffers = self._buffers.of(delivery, self._runtime, self.settings.placement, shared=shared)
        for number, bucket in enumerate(delivery.buckets):
            flats = {
                p.receiver: buffers[p.receiver][number % 2] if buffers else weights.buffer(p.n_bytes)
                for p in bucket.payloads
            }
            with self.timed("gather"):
                weights.deliver(delivery, bucket, flats)
            run.settle()
            with self.timed("gather"):
                if shared:
                    # After the barrier, this bucket is complete, and the servers have read the previous bucket. The
                    # next bucket overwrites the buffer of the previous bucket on every rank.
                    dist.barrier()
                self._runtime.synchronize()  # another process cannot wait for our CUDA stream
            with self.timed("load"):
                run.load([(payload, flats[payload.receiver]) for payload in bucket.payloads])

    def _transport(self, endpoint: Endpoint, shape: EngineShape) -> Transport:
        key = (endpoint.index, endpoint.starts)
        if key not in self._transports:
            for old in [k for k in self._transports if k[0] == endpoint.index]:
                self._transports.pop(old).close()
            self._transports[key] = self._make_transport(endpoint, shape)
        return self._transports[key]

    def _make_transport(self, endpoint: Endpoint, shape: EngineShape) -> Transport:
        rank, timeout = self._runtime.rank, self.settings.sync_timeout_seconds
        if self.settings.placement == "colocated":
            return SharedTransport(endpoint, shape, rank, timeout, self.fleet.feeding.opening(endpoint.index, rank))
        address, backend = self.settings.sync_address, self._runtime.backend
        return BroadcastTransport(endpoint, shape.tp, rank, address, timeout, backend)

    # Memory and end

    def sleep(self) -> None:
        """See `Engine.sleep`. Only colocated servers on GPUs sleep, because the trainer can use their memory."""
        if self.fleet.spec.memory_saver and not self._asleep:
            self._note_failures(
                self.fleet.each_own(self._endpoints, lambda server: server.release((*WEIGHTS, *CACHES)))
            )
            if self.settings.tensor_parallel > 1:  # a server answers when its first rank has released (0.5.23)
                self._runtime.await_freed_memory()
            self._asleep, self.current = True, set()

    def _give_back(self) -> None:
        """Release the cached memory of torch's allocator on every rank, before servers on the GPUs of the trainer
        need it. Otherwise the wake-up fails on full GPUs (verl #575 and #6912)."""
        if self.fleet.spec.memory_saver:
            self._runtime.release_cached_memory()
            all_gather_objects(None)  # a barrier, because a server may use the GPUs of several ranks

    def close(self) -> None:
        """End the servers of this rank and remove all their files."""
        self._dispatcher.close()
        for transport in self._transports.values():
            transport.close()
        self._transports = {}
        self._buffers.free()
        self.fleet.close()


def served_engine(
    *, config: Config, folder: Path, stop_token_ids: tuple[int, ...], runtime: Runtime, stop: Stop
) -> SGLangEngine:
    """See `EngineFactory`. Starts the servers."""
    spec = ServerSpec.of(config, folder, stop_token_ids, on_cuda=runtime.on_cuda, device_bytes=device_bytes())
    return SGLangEngine(Fleet(spec, runtime), config.rollout.server_settings, runtime, stop)
