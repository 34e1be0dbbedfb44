"""A group of SGLang servers as one engine, driven by all ranks of the trainer together.

Every rank sends its prompts to any server. The rank that started a server (its sender) also restarts the server after
a failure and sets its weight version. `feeding` selects the ranks that send weights to the server. Ranks agree on
failures, so that all ranks raise the same error or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.distributed as dist

from megappo.config import Config
from megappo.config.engine import SGLangSettings
from megappo.engines.protocol import (
    CacheUse,
    Completion,
    GenerateRequest,
    Listener,
    RequestStream,
    SamplingParams,
    TurnDriver,
)
from megappo.engines.sglang.buffers import SyncBuffers
from megappo.engines.sglang.client import Endpoint, failures_of
from megappo.engines.sglang.dispatch import Outcome, Round, RoundLimits
from megappo.engines.sglang.fleet import Fleet, Started, by_server
from megappo.engines.sglang.homes import Homes
from megappo.engines.sglang.in_flight import Departures, InFlightRound, abort_servers
from megappo.engines.sglang.rounds import Rounds, answers_of_each
from megappo.engines.sglang.server import CACHES, WEIGHTS, EngineError, Server
from megappo.engines.sglang.spec import ServerSpec
from megappo.engines.sglang.streaming import OpenRound
from megappo.engines.sglang.sync import ServerSync, SyncRun, SyncSeconds
from megappo.engines.sglang.transport import BroadcastTransport, SharedTransport, Transport
from megappo.observe.messages import show_message
from megappo.reshard.slices import EngineShape, Receiver
from megappo.reshard.stream import WeightStream
from megappo.runtime.device import device_bytes
from megappo.runtime.interrupts import NeverStop, Stop
from megappo.runtime.objects import all_gather_objects
from megappo.runtime.process import Runtime


class SyncError(EngineError):
    """Servers whose weights differ from the sent weights."""


@dataclass
class Pending:
    """Handle of requests in flight. See `PendingCompletions`."""

    requests: Sequence[GenerateRequest]
    params: SamplingParams
    version: int
    round: Round
    completions: dict[int, Completion] = field(default_factory=dict)


class SGLangEngine:
    """An `Engine` whose methods are collectives of the world. All ranks call each method at the same time."""

    def __init__(self, fleet: Fleet, settings: SGLangSettings, runtime: Runtime, stop: Stop | None = None) -> None:
        """Create the engine without waiting. Servers load in the background, and the first update waits for them."""
        self.fleet, self.settings, self._runtime = fleet, settings, runtime
        self._limits = RoundLimits.of(settings, runtime.deadlines)
        self._stop: Stop = stop if stop is not None else NeverStop()
        self.returns_routing = fleet.spec.returns_routing
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
        self._pending: list[Pending] = []
        self._streams: list[OpenRound] = []
        """Open streams of turns."""
        self._departures = Departures()
        self.on_tokens: Callable[[], None] = lambda: None
        self.keeps_requests = settings.keeps_requests
        """See `HoldingEngine.keeps_requests`."""
        self.restarts = 0
        """Number of server restarts over the run."""
        self._homes, self._rounds = Homes(), Rounds()
        self.cache_use: dict[int, CacheUse] = {}
        """See `CachingEngine.cache_use`."""
        self._sync_seconds = SyncSeconds()
        self.transfer_seconds = 0.0
        """See `TimedEngine.transfer_seconds`."""

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """Addresses of the servers. Empty before the first update."""
        return tuple(self._endpoints)

    # Generation

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        done: MutableMapping[int, Completion] | None = None,
    ) -> list[Completion]:
        """See `Engine.generate`. A rank without prompts passes an empty sequence."""
        pending = self.submit(requests, params)
        try:
            return self.collect(pending)
        finally:
            if done is not None:
                done.update(pending.completions)

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Pending:
        """Send requests and return immediately. `collect` returns the answers. This method is not a collective."""
        self._require_weights()
        round_ = self._start_round(dict(enumerate(requests)), params)
        self._pending.append(Pending(requests, params, self.version, round_))
        return self._pending[-1]

    def collect(self, pending: Pending, *, weights_changed: bool = False) -> list[Completion]:
        """Return the answers in order. Unanswered requests of failed servers move to other servers or wait.

        `weights_changed` indicates that the actor was updated since the last sync. After a server restart, all
        servers then receive the new weights under a new version.
        """
        while True:
            outcome = pending.round.result(self._stop)
            pending.completions |= outcome.completions
            self._stop.check()  # raises on every rank if one rank has not waited for its answers
            left = {i: r for i, r in enumerate(pending.requests) if i not in pending.completions}
            if self._all_is_answered(len(left), outcome, [*left.values()]):
                self._pending.remove(pending)
                return [pending.completions[i] for i in range(len(pending.requests))]
            self._bring_up_to_date(self.version + 1 if weights_changed else None)
            weights_changed = False
            pending.round = self._start_round(left, pending.params)

    def converse(self, driver: TurnDriver, params: SamplingParams) -> None:
        """See `ConversingEngine.converse`. Unanswered requests of failed servers are sent again, as in `collect`."""
        self.finish_stream(driver, self.open_stream(driver, params), params)

    def open_stream(self, driver: TurnDriver, params: SamplingParams) -> OpenRound:
        """See `ConversingAheadEngine.open_stream`."""
        self._require_weights()
        stream = OpenRound(self._ready, driver, params, self.version, self._limits, self.on_tokens)
        self._streams.append(stream)
        return stream

    def finish_stream(
        self, driver: TurnDriver, stream: RequestStream, params: SamplingParams, *, weights_changed: bool = False
    ) -> None:
        """See `ConversingAheadEngine.finish_stream`."""
        while True:
            assert isinstance(stream, OpenRound)
            try:
                left = driver.drive(stream)
            finally:
                self._streams.remove(stream)
                outcome = stream.hang_up()
            self._stop.check()
            if self._all_is_answered(left, outcome):
                return
            self._bring_up_to_date(self.version + 1 if weights_changed else None)
            weights_changed = False
            stream = self.open_stream(driver, params)

    def send(self, requests: Mapping[int, GenerateRequest], params: SamplingParams) -> None:
        """See `InFlightEngine.send`."""
        self._departures.send(requests, lambda: self._begin_flight(params))

    def listen(self, listener: Listener) -> None:
        """See `InFlightConversingEngine.listen`."""
        self._departures.listener = listener

    def _begin_flight(self, params: SamplingParams) -> InFlightRound:
        self._require_weights()
        told = self._departures.listener
        return InFlightRound(self._ready, params, self.version, self._limits, self.on_tokens, told)

    def finished(self, wait_seconds: float) -> dict[int, Completion]:
        """See `InFlightEngine.finished`. Other servers continue the requests of failed servers. All requests are then
        interrupted to restart the failed servers."""
        self._stop.check()  # before answers are taken, which would be lost
        stream, before = self._departures.stream, set(self.current)
        found = {} if stream is None else stream.take(wait_seconds)
        self._all_is_answered(0, Outcome({}, stream.failures, stream.refusal, {}, len(found)) if stream else Outcome())
        if self.current != before:
            with self._departures.kept_back():
                found |= self.abort()
                self._bring_up_to_date()
        return found

    def abort(self) -> dict[int, Completion]:
        """See `InFlightEngine.abort`. Afterwards no server has a request in flight. A request that a server has
        rejected has no answer. If sent again, the request is rejected again and ends the run."""
        stream = self._departures.take_stream()
        if stream is not None:
            stream.break_off()
        mine = [endpoint for endpoint in self._ready if endpoint.sender == self._runtime.rank]
        failures = abort_servers(stream, mine, self.settings)
        found, outcome = ({}, Outcome()) if stream is None else stream.end()
        self._note_cache_use(outcome)
        self._note_failures(failures | by_server(outcome.failures))
        return found

    def hold(self) -> None:
        """See `HoldingEngine.hold`."""
        self._departures.hold()
        mine = [endpoint for endpoint in self._ready if endpoint.sender == self._runtime.rank]
        order, patience = {"mode": self.settings.pause}, self.settings.sync_timeout_seconds
        self._note_failures(by_server(failures_of(mine, "/pause_generation", order, patience)))

    def _all_is_answered(self, left: int, outcome: Outcome, requests: Sequence[GenerateRequest] = ()) -> bool:
        """Return whether all requests are answered; remove failed servers. A collective; raises as `Rounds.agree`."""
        self._note_cache_use(outcome)
        is_over, failures = self._rounds.agree(left, outcome, requests)
        self._note_failures(failures)
        return is_over

    def _note_cache_use(self, outcome: Outcome) -> None:
        self.cache_use |= {i: self.cache_use[i] + use for i, use in outcome.cache.items()}

    def _require_weights(self) -> None:
        if not self.current or self._asleep:
            state = "is asleep" if self._asleep else "has no complete set of weights"
            raise RuntimeError(f"the engine {state}; call update_weights first")

    def _note_failures(self, reasons: Mapping[int, str]) -> None:
        """Exclude these servers until their next successful check, and report the reasons once."""
        self._suspects |= reasons.keys()
        self.current -= reasons.keys()
        if self._runtime.is_main:
            for reason in reasons.values():
                show_message(f"{reason}; the server will be restarted if necessary", warns=True)

    def _start_round(self, requests: dict[int, GenerateRequest], params: SamplingParams) -> Round:
        return Round(self._ready, requests, params, self.version, self._limits, self.on_tokens, self._homes)

    @property
    def _ready(self) -> list[Endpoint]:
        """Servers with the current weights, in the same order on every rank, which `RequestAssignment` needs."""
        return [endpoint for endpoint in self._endpoints if endpoint.index in self.current]

    # Weights

    def update_weights(self, named_tensors: WeightStream, version: int) -> None:
        """See `Engine.update_weights`. Uses the buckets of the stream. Raises SyncError if a server does not receive
        the weights."""
        self._weights = named_tensors
        with self._departures.given(version):
            self._bring_up_to_date(version)
        self._asleep = False

    def _bring_up_to_date(self, newer_version: int | None = None) -> None:
        """Restart dead servers and send weights to outdated servers, until every server has this version or a newer
        one."""
        if newer_version is not None:
            self.version, self.current = newer_version, set()
            self._sync_seconds = SyncSeconds()
            self._homes.forget()
        problems: dict[int, str] = {}
        for _ in range(self.settings.sync_attempts):
            with self._sync_seconds.timed("wake"):
                self._give_back()
                self._revive()
            stale = [e for e in self._endpoints if e.index not in self.current]
            if not stale:
                return
            problems = self._renew(stale)
            self.current |= {e.index for e in stale}
            self._note_failures(problems)
            if not problems:
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
        self.restarts += sum(fact.restarts for fact in facts)
        self.current -= fresh.keys()
        self._endpoints = [(known | fresh)[index] for index in sorted(known | fresh)]
        self._suspects = set()
        self.cache_use = {e.index: self.cache_use.get(e.index, CacheUse()) for e in self._endpoints}

    def _renew(self, stale: Sequence[Endpoint]) -> dict[int, str]:
        """Make one attempt to update servers to this version. Returns the problems by server, the same on every rank.

        On the GPUs of the trainer, the memory of the key-value cache is allocated last, after the buckets are free.
        """
        if not self.fleet.spec.memory_saver:
            return self._sync(stale)

        def make_ready(server: Server) -> None:
            server.release(CACHES)  # for a server that has just started; a sleeping server has released its caches
            server.resume(WEIGHTS)

        with self._sync_seconds.timed("wake"):
            problems = self.fleet.each_own(stale, make_ready)
        problems |= self._sync([endpoint for endpoint in stale if endpoint.index not in problems])
        with self._sync_seconds.timed("wake"):
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
        run = SyncRun(mine, shape, given.sync_timeout_seconds, given.verify, self._sync_seconds, given.pause)
        run.begin()
        run.give_up(by_server(run.problems))  # nothing is sent before all sessions are open
        before = self._sync_seconds.transfer
        self._send(run, weights, [receiver for e in stale for receiver in feeders[e.index]])
        run.finish(self.version)
        self.transfer_seconds = self._sync_seconds.transfer - before
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
            with self._sync_seconds.timed("gather"):
                weights.deliver(delivery, bucket, flats)
            run.settle()
            with self._sync_seconds.timed("gather"):
                if shared:
                    # After the barrier, this bucket is complete, and the servers have read the previous bucket. The
                    # next bucket overwrites the buffer of the previous bucket on every rank.
                    dist.barrier()
                self._runtime.synchronize()  # another process cannot wait for our CUDA stream
            with self._sync_seconds.timed("load"):
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

    # Verification and figures

    def sync_phases(self) -> dict[str, float]:
        """See `ServedEngine.sync_phases`."""
        return asdict(self._sync_seconds)

    def probe(self, request: GenerateRequest, params: SamplingParams) -> dict[int, Completion]:
        """See `ServedEngine.probe`. Restarts and updates a server that fails during the probe. Raises EngineError if
        a server rejects the request."""
        for _ in range(self.settings.sync_attempts):
            mine = [e for e in self._endpoints if e.sender == self._runtime.rank]
            rounds = [Round([e], {e.index: request}, params, self.version, self._limits) for e in mine]
            answers, failures = answers_of_each(rounds)
            if not failures:
                return answers
            self._note_failures(failures)
            self._bring_up_to_date()
        raise SyncError(f"servers fail after every weight sync: {'; '.join(failures.values())}")

    def judge(self, gaps: Mapping[int, float], tolerance_nats: float) -> float:
        """See `ServedEngine.judge`."""
        found = by_server(gaps)
        index = max(found, key=lambda i: found[i] if found[i] == found[i] else float("inf"))
        if not found[index] <= tolerance_nats:
            raise SyncError(
                f"after weight sync {self.version} server {index} has log-probabilities {found[index]:.3g} nats "
                f"from those of the trainer, above rollout.sglang.probe_tolerance_nats {tolerance_nats:g}; the "
                "server computes a different result with the same weights"
            )
        return found[index]

    # Memory and end

    def sleep(self) -> None:
        """See `ServedEngine.sleep`. Only colocated servers on GPUs sleep, because the trainer can use their memory."""
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
        for pending in self._pending:
            pending.round.cancel()
        for stream in (*self._streams, self._departures.take_stream()):
            if stream is not None:
                stream.cancel()
        for transport in self._transports.values():
            transport.close()
        self._pending, self._transports, self._streams = [], {}, []
        self._buffers.free()
        self.fleet.close()


def served_engine(
    *, config: Config, folder: Path, stop_token_ids: tuple[int, ...], runtime: Runtime, stop: Stop
) -> SGLangEngine:
    """See `EngineFactory`. Starts the servers."""
    spec = ServerSpec.of(config, folder, stop_token_ids, on_cuda=runtime.on_cuda, device_bytes=device_bytes())
    return SGLangEngine(Fleet(spec, runtime), config.rollout.servers, runtime, stop)
