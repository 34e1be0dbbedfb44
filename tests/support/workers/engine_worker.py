"""Real SGLang servers with weights from real Megatron actors; see test_engines.py.

Usage (under torchrun, two processes): engine_worker.py SCENARIO OUT.json

Each scenario starts its servers once and runs all checks on these servers. The results are written as numbers and
texts, which the test compares with its expectations.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch.distributed as dist
from aiohttp import ClientSession
from transformers import AutoTokenizer

import megappo.ppo.components
from megappo.config import derive_run, load_config
from megappo.config.schema import RolloutSettings
from megappo.engines.protocol import GenerateRequest, SamplingParams
from megappo.engines.sglang import inspection
from megappo.engines.sglang.client import call
from megappo.engines.sglang.engine import SGLangEngine, SyncError
from megappo.engines.sglang.guard import session_pids, shared_files
from megappo.engines.sglang.inspection import ServerInfo, check_room
from megappo.engines.sglang.server import EngineError
from megappo.engines.sglang.transport import BroadcastTransport, Loaded, SharedTransport, share_buffers
from megappo.engines.stopping import StopTexts
from megappo.megatron.placed import announce, place
from megappo.plan.cache import PlannedCache
from megappo.ppo.components import RunComponents, assemble
from megappo.ppo.measures import check_mismatch
from megappo.ppo.reporting import Reporter
from megappo.ppo.trainer import Trainer
from megappo.reshard.feeding import Feeding
from megappo.reshard.stream import WeightStream
from megappo.runtime.nccl import SETTINGS, own_stack
from megappo.runtime.process import Runtime, start_runtime
from tests.support.in_flight_servers import aborted_by_sync, paused_by_sync, struck_in_flight
from tests.support.models import VOCAB, write_model
from tests.support.places import ROOT
from tests.support.rewards import without_reward_workers

SHORT_WAITS = "stall_timeout_seconds: 3, health_timeout_seconds: 10, sync_timeout_seconds: 60"
CACHE_TOKENS = 16384
APART = "{ranks: 1, first_rank: 1}"
LONG = SamplingParams(temperature=1.0, max_new_tokens=50, stop_token_ids=(1,))


class Bench:
    """The servers of a configuration, and actors of any layout that use these servers."""

    def __init__(self, folder: Path, runtime: Runtime, family: str, sglang: str, **changes: Any) -> None:
        self.folder, self.runtime = folder, runtime
        self.model = folder / family
        if runtime.is_main:
            write_model(self.model, family, 3, **changes)
        dist.barrier()
        self.overrides = [
            f"model.path={self.model}",
            f"model.tokenizer={ROOT / 'configs/models/tiny_arithmetic'}",
            "model.init=pretrained",
            f"rollout.sglang={{max_total_tokens: {CACHE_TOKENS}, threads: 1, {SHORT_WAITS}, {sglang}}}",
            "rollout.max_response_tokens=24",
            "rollout.temperature=0.8",
            "rollout.sync_bucket_bytes=12000",  # several buckets for a model of 100 kB
            "actor.microbatch_budget_tokens=2048",
            "rollout.prompts_per_step=10",
            "actor.minibatch_sequences=40",
            "actor.optimizer.learning_rate=0.01",
            "algorithm.mismatch_stop_nats=100",  # a server without the update has a large mismatch
            "logging={console: quiet, tensorboard: false}",
            "evaluation=null",
            "data.validation=null",
        ]
        self.engine: SGLangEngine | None = None
        self.weights: WeightStream | None = None
        """Weights of the newest actor."""
        self.made = 0

    def trainer(self, layout: str) -> Trainer:
        """Return a trainer with a new actor and the running servers as its engine. A critic exists only for the
        layout in which another rank needs a role."""
        self.made += 1
        overrides = [*self.overrides, f"actor.layout={layout}", f"run.directory={self.folder / str(self.made)}"]
        critic = ["critic.layout={ranks: 1}", "critic.minibatch_sequences=40", "critic.microbatch_budget_tokens=2048"]
        overrides += critic if layout == APART else ["critic=null", "algorithm.estimator=grpo"]
        config = load_config(ROOT / "configs/sglang_quickstart.yaml", overrides)
        make = megappo.ppo.components.make_engine if self.engine is None else lambda *_: self.engine
        with without_reward_workers(), patch.object(megappo.ppo.components, "make_engine", make):
            parts = assemble(config, derive_run(config, self.runtime.world_size), self.runtime)
        assert isinstance(parts.engine, SGLangEngine)
        self.engine, self.weights = parts.engine, parts.weights
        return Trainer(parts, Reporter(config, parts.derived, self.runtime))

    def sessions(self) -> list[int]:
        """Return the process ids of the servers and parts of servers of this rank."""
        assert self.engine is not None
        fleet = self.engine.fleet
        return [server.session for server in (*fleet.servers.values(), *fleet.parts.values())]


def after_an_update(bench: Bench, layout: str) -> dict[str, Any]:
    """Sync, update the actor, sync, and sample. Return the differences between engine and trainer after these steps."""
    trainer = bench.trainer(layout)
    parts = trainer.parts
    assert isinstance(parts.engine, SGLangEngine)
    with counted(parts.weights) as count:
        trainer.sync_weights()
    first, wake = trainer.metrics["sync/probe_gap"], parts.engine.sync_phases()["wake"]
    trainer.step = 1
    rollouts = trainer.responses.of_step(1, weights_changed=False)
    placed, scored = trainer.forward(rollouts, score_by_length(rollouts))
    trainer.update_actor(placed, trainer.estimate_advantages(scored))
    before = mismatch(parts, trainer, 2)
    trainer.weight_version = parts.engine.version
    trainer.sync_weights()
    return {
        "probe": max(first, trainer.metrics["sync/probe_gap"]),
        "without_sync": before,
        "after_sync": mismatch(parts, trainer, 3),
        "buckets": float(count[0]),
        "received": parts.weights.received_bytes,
        "planned": 2 * planned_bytes(parts),
        "model": parts.weights.total_bytes,
        "replayed": trainer.metrics.get("mismatch/router_replayed", 0.0),
        "changed": trainer.metrics.get("mismatch/router_changed", 0.0),
        "version": float(parts.engine.version),
        "wake": wake,
        "phases": sum(parts.engine.sync_phases().values()) / trainer.metrics["sync/seconds"],
    }


def planned_bytes(parts: RunComponents) -> int:
    """Return the bytes that this rank should receive in a sync."""
    engine, holdings = parts.engine, parts.weights.holdings
    assert isinstance(engine, SGLangEngine)
    feeding = engine.fleet.feeding
    receivers = {r for e in engine.endpoints for r in feeding.feeders(e.index, holdings.grid)}
    mine = [r for r in receivers if r.rank == parts.runtime.rank and not feeding.shares_memory]
    return sum(holdings.sources(r, 4).total() for r in mine)


@contextmanager
def counted(weights: WeightStream) -> Iterator[list[int]]:
    """Count the buckets with data of this rank."""
    count, deliver = [0], weights.deliver

    def counting(*arguments: Any) -> None:
        count[0] += 1
        deliver(*arguments)

    with patch.object(weights, "deliver", counting):
        yield count


def score_by_length(rollouts: Any) -> Any:
    return rollouts.response_lengths_B.float() % 5


def mismatch(parts: RunComponents, trainer: Trainer, step: int) -> float:
    """Return the largest gap between engine and trainer on a new batch, in nats."""
    rollouts = trainer.responses.of_step(step, weights_changed=False)
    assert set(rollouts.weight_versions_B.tolist()) == {parts.engine.version}
    logprob = place(parts.actor, announce(rollouts, parts.runtime.device)).forward()
    numbers = check_mismatch(logprob, rollouts, parts.config.algorithm, parts.runtime, parts.engine.version)
    return numbers["mismatch/max"]


def requests(rank: int, count: int = 24) -> list[GenerateRequest]:
    return [
        GenerateRequest((2 + rank, 3 + i % 7, 4 + i % 11), seed=1000 * rank + i, prompt_id=count * rank + i)
        for i in range(count)
    ]


@contextmanager
def struck(bench: Bench, number: int) -> Iterator[None]:
    """Send a signal to server 0 after it has received a part of the requests of this rank, and before the last part.
    The server therefore has unanswered requests, for any speed."""
    assert bench.engine is not None
    (url,) = (f"{endpoint.url}/generate" for endpoint in bench.engine.endpoints if endpoint.index == 0)
    original, count = ClientSession.post, [0]

    @asynccontextmanager
    async def post(self: ClientSession, to: str, **options: Any) -> AsyncIterator[Any]:
        count[0] += to == url
        if to == url and count[0] == 2:
            await asyncio.sleep(0.1)
            for pid in session_pids(bench.sessions()[0]):
                os.kill(pid, number)
        async with original(self, to, **options) as answer:
            yield answer

    with patch.object(ClientSession, "post", post):
        yield


def disturbed_rollout(bench: Bench, number: int) -> dict[str, Any]:
    """Compare the answers to the same requests without a fault and with a fault of a server during generation."""
    engine, rank = bench.engine, bench.runtime.rank
    assert engine is not None and bench.weights is not None
    calm = engine.generate(requests(rank), LONG)
    restarts = engine.restarts
    with struck(bench, number) if rank == 0 else nullcontext():
        rough = engine.generate(requests(rank), LONG)
    survivors = sorted(engine.current)
    engine.update_weights(bench.weights, engine.version)  # includes restarted servers
    again = engine.generate(requests(rank), LONG)
    return {
        "answers": len(rough),
        "same_tokens": [c.token_ids for c in calm] == [c.token_ids for c in rough] == [c.token_ids for c in again],
        "logprob_gap": max(
            abs(x - y) for a, b in zip(calm, rough, strict=True) for x, y in zip(a.logprobs, b.logprobs, strict=False)
        ),
        "survivors": survivors,
        "restarts": engine.restarts - restarts,
        "versions": sorted({c.weight_version for c in rough}),
        "version": engine.version,
    }


def ended_by_texts(bench: Bench) -> dict[str, Any]:
    """Compare the answers to the same requests with and without a stop text, which occurs in one of the answers. Most
    tokens have no text, so a text usually consists of several tokens."""
    engine, tokenizer = bench.engine, AutoTokenizer.from_pretrained(ROOT / "configs/models/tiny_arithmetic")
    assert engine is not None
    sent, free = requests(bench.runtime.rank), replace(LONG, stop_token_ids=())
    whole = engine.generate(sent, free)
    text = next(m[0] for c in whole if (m := re.search(r"\d\d", tokenizer.decode(c.token_ids))))
    stopped = engine.generate(sent, replace(free, stop_texts=StopTexts((text,), tokenizer)))
    ends = []
    for answer in whole:
        ids = answer.token_ids
        texts = [tokenizer.decode(ids[: n + 1], skip_special_tokens=False) for n in range(len(ids))]
        ends.append(next((n + 1 for n, so_far in enumerate(texts) if text in so_far), 0))
    return {
        "ends": ends,
        "whole": [len(c.token_ids) for c in whole],
        "lengths": [len(c.token_ids) for c in stopped],
        "same_tokens": all(w.token_ids[: len(c.token_ids)] == c.token_ids for w, c in zip(whole, stopped, strict=True)),
        "gap": max(
            abs(x - y)
            for w, c in zip(whole, stopped, strict=True)
            for x, y in zip(w.logprobs, c.logprobs, strict=False)
        ),
        "truncated": [c.truncated for c in stopped if len(c.token_ids) < LONG.max_new_tokens],
    }


def of_at_least(bench: Bench) -> dict[str, Any]:
    """Sample two tokens per request of one prompt. All tokens except two are stop tokens, which are excluded for the
    first token."""
    engine = bench.engine
    assert engine is not None
    sent = [replace(request, token_ids=(5, 6, 7)) for request in requests(bench.runtime.rank)]
    ends = tuple(token for token in range(VOCAB) if token not in (3, 4))
    params = replace(LONG, max_new_tokens=2, stop_token_ids=ends)
    answers = engine.generate(sent, replace(params, min_new_tokens=1))
    first = {c.token_ids[0]: c.logprobs[0] for c in answers}
    return {
        "first": sorted(first),
        "sum": sum(math.exp(x) for x in first.values()),
        "later": len({c.token_ids[1] for c in answers}),
        "unbound": len({c.token_ids[0] for c in engine.generate(sent, params)}),
    }


@contextmanager
def loading(replacement: Callable[[Loaded], Loaded]) -> Iterator[None]:
    """Pass payloads through `replacement` before they are loaded."""
    shared, broadcast = SharedTransport.prepare, BroadcastTransport.prepare
    with (
        patch.object(SharedTransport, "prepare", lambda self, p, others: shared(self, replacement(p), others)),
        patch.object(BroadcastTransport, "prepare", lambda self, p, others: broadcast(self, replacement(p), others)),
    ):
        yield


def corrupted_sync(trainer: Trainer, victim: str, times: int) -> dict[str, Any]:
    """Change one number of a tensor during the transfer, `times` times."""
    left = [times]

    def change(payloads: Loaded) -> Loaded:
        ((payload, flat),) = payloads
        slot = next((s for s in payload.slots if s.name == victim), None)
        if slot is None or not left[0]:
            return payloads
        left[0] -= 1
        wrong = share_buffers(1, payload.n_bytes)[0]
        wrong.copy_(flat[: payload.n_bytes])
        slot.view(wrong).view(-1)[5] += 1e-3
        return [(payload, wrong)]

    error = ""
    with loading(change):
        try:
            trainer.sync_weights()
        except SyncError as problem:
            error = str(problem)
    return {"error": error, "current": sorted(trainer.parts.engine.current), "version": trainer.parts.engine.version}  # type: ignore[attr-defined]


def following(bench: Bench, layout: str) -> Trainer:
    """Return a trainer with a new actor whose weights have the version after that of the engine."""
    trainer = bench.trainer(layout)
    trainer.weight_version = trainer.parts.engine.version
    return trainer


def cut_sync(bench: Bench, trainer: Trainer, victim: int = 0) -> dict[str, Any]:
    """Kill a server of this rank, or its part of a server, during a sync after some buckets are loaded."""
    engine = bench.engine
    assert engine is not None
    restarts, seen = engine.restarts, [0]

    def kill(payloads: Loaded) -> Loaded:
        seen[0] += 1
        if bench.runtime.rank == victim and seen[0] == 4:
            for pid in session_pids(bench.sessions()[0]):
                os.kill(pid, signal.SIGKILL)
        return payloads

    with loading(kill):
        trainer.sync_weights()
    return {
        "restarts": engine.restarts - restarts,
        "probe": trainer.metrics["sync/probe_gap"],
        "moving": (trainer.metrics["sync/gather_seconds"], trainer.metrics["sync/transfer_seconds"]),
        "speed": trainer.metrics["sync/gigabytes_per_second"] * trainer.metrics["sync/transfer_seconds"],
        "model": trainer.parts.weights.total_bytes / 1e9,
        "current": sorted(engine.current),
        "mismatch": mismatch(trainer.parts, trainer, 9),
    }


def two_engines(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Run Llama with two servers of one rank each. Each trainer rank manages one server."""
    bench = Bench(folder, runtime, "llama", "engines: 2", tie_word_embeddings=False)
    bench.overrides.append("rollout.stop=[no model says so]")  # a setting for which servers need the texts of tokens
    results: dict[str, Any] = {"TP2": after_an_update(bench, "{tensor_parallel: 2}")}
    results["texts"] = ended_by_texts(bench)
    results["least"] = of_at_least(bench)
    results["kill"] = disturbed_rollout(bench, signal.SIGKILL)
    results["PP2"] = after_an_update(bench, "{pipeline_parallel: 2}")
    trainer = following(bench, "{tensor_parallel: 2}")
    results["in_flight"] = aborted_by_sync(trainer, requests(runtime.rank))
    results["retract"] = paused_by_sync(trainer, requests(runtime.rank), "retract")
    results["in_place"] = paused_by_sync(trainer, requests(runtime.rank), "in_place")
    results["cut"] = cut_sync(bench, trainer)
    victim = "model.layers.2.mlp.up_proj.weight"
    results["once"] = corrupted_sync(trainer, victim, 1)
    results["always"] = corrupted_sync(trainer, victim, 99)
    return results | leave(bench)


def struck_engines(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Run the same servers. One server hangs in a rollout and dies with prompts in flight."""
    bench = Bench(folder, runtime, "llama", "engines: 2", tie_word_embeddings=False)
    results: dict[str, Any] = {"PP2": after_an_update(bench, "{pipeline_parallel: 2}")}
    results["stop"] = disturbed_rollout(bench, signal.SIGSTOP)
    trainer = following(bench, "{tensor_parallel: 2}")
    trainer.sync_weights()  # the weights for the comparison with the answers of the engine
    results["in_flight_killed"] = struck_in_flight(trainer, requests(runtime.rank), bench.sessions())
    return results | leave(bench)


@contextmanager
def recorded(events: list[str]) -> Iterator[None]:
    """Record the requests of this rank to servers, the tags of memory parts in these requests, and releases of the
    torch cache. Consecutive equal requests are recorded once."""
    original = http.client.HTTPConnection.request

    def note(event: str) -> None:
        if event == "cache" or events[-1:] != [event]:
            events.append(event)

    def request(self: Any, method: str, path: str, body: Any = None, *rest: Any) -> None:
        note(" ".join([path.split("?")[0], *json.loads(body or "{}").get("tags", ())]))
        original(self, method, path, body, *rest)

    with (
        patch.object(http.client.HTTPConnection, "request", request),
        patch.object(Runtime, "release_cached_memory", lambda self: note("cache")),
        patch.object(Runtime, "await_freed_memory", lambda self: note("freed")),
    ):
        yield


def by_messages() -> Any:
    """Use messages instead of shared memory, as on GPUs and between machines. Each rank receives the weights for the
    rank of the server on its device, and sends its own weights."""
    return patch.object(Feeding, "shares_memory", False)


def asleep_and_awake(bench: Bench, layout: str) -> dict[str, Any]:
    """Sleep between two syncs."""
    trainer = bench.trainer(layout)
    engine, events = trainer.parts.engine, list[str]()
    assert isinstance(engine, SGLangEngine)
    trainer.weight_version = engine.version
    with recorded(events):
        engine.sleep()
        trainer.sync_weights()
    return {"events": events, "mismatch": mismatch(trainer.parts, trainer, 4), "restarts": engine.restarts}


def sharded_engine(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Run Qwen3 with tied embeddings on one server of two ranks that releases its memory during training, as on
    shared GPUs. SGLang on a CPU executes everything except the release."""
    with patch.object(RolloutSettings, "servers_sleep", lambda *_, **__: True):
        bench = Bench(folder, runtime, "qwen3", "tensor_parallel: 2", tie_word_embeddings=True)
        results: dict[str, Any] = {"TP2": after_an_update(bench, "{tensor_parallel: 2}")}
    results["PP2"] = after_an_update(bench, "{pipeline_parallel: 2}")
    with by_messages():
        results["PP2-messages"] = after_an_update(bench, "{pipeline_parallel: 2}")
        results["apart-messages"] = after_an_update(bench, APART)
    results["asleep"] = asleep_and_awake(bench, "{tensor_parallel: 2}")
    return results | leave(bench)


@contextmanager
def separate_machines(runtime: Runtime) -> Iterator[None]:
    """Simulate a separate machine for each rank. The servers are not affected."""
    with patch.object(socket, "gethostname", lambda: f"n{runtime.rank}"):
        yield


def experts_engine(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Run Qwen3 with experts on one server of two ranks on separate machines. Tensor parallelism splits the matrices
    of experts."""
    served = "tensor_parallel: 2, nodes: 2"
    with separate_machines(runtime):
        bench = Bench(folder, runtime, "qwen3_moe", served, tie_word_embeddings=False)
        results: dict[str, Any] = {"EP2": after_an_update(bench, "{expert_parallel: 2}")}
    results["cut"] = cut_sync(bench, following(bench, "{expert_parallel: 2}"), victim=1)
    return results | leave(bench)


def attending_engine(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Run the same model with expert parallelism and data parallel attention."""
    served = "tensor_parallel: 2, expert_parallel: 2, data_parallel_attention: 2, nodes: 2"
    with separate_machines(runtime):
        bench = Bench(folder, runtime, "qwen3_moe", served, tie_word_embeddings=False)
        layout = "{tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}"
        results = {"TP2xEP2": after_an_update(bench, layout)}
    return results | leave(bench)


def mixtral_engine(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Run Mixtral, whose files have different names, on one server of two ranks."""
    bench = Bench(folder, runtime, "mixtral", "tensor_parallel: 2", tie_word_embeddings=False)
    results: dict[str, Any] = {"EP2": after_an_update(bench, "{expert_parallel: 2}")}
    return results | leave(bench)


def glm_engine(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Run GLM, which has a first layer without experts and biases in its routers, on one server of two ranks."""
    bench = Bench(folder, runtime, "glm4_moe", "tensor_parallel: 2", tie_word_embeddings=False)
    results: dict[str, Any] = {"PP2": after_an_update(bench, "{pipeline_parallel: 2}")}
    return results | leave(bench)


def plain_engine(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Run Llama on one server of one rank without seeds, which is the default on GPUs."""
    bench = Bench(folder, runtime, "llama", "deterministic: false", tie_word_embeddings=True)
    results: dict[str, Any] = {"TP2": after_an_update(bench, "{tensor_parallel: 2}")}
    return results | leave(bench)


def broadcast_engine(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Run Llama with tied embeddings and send its weights through a broadcast group."""
    bench = Bench(folder, runtime, "llama", "placement: disaggregated", tie_word_embeddings=True)
    results: dict[str, Any] = {"TP2": after_an_update(bench, "{tensor_parallel: 2}")}
    results["kill"] = disturbed_rollout(bench, signal.SIGKILL)
    results["DP2"] = after_an_update(bench, "{}")
    results["PP2"] = after_an_update(bench, "{pipeline_parallel: 2}")
    results["cut"] = cut_sync(bench, following(bench, "{pipeline_parallel: 2}"))
    results["apart"] = after_an_update(bench, APART)
    results["external"] = through_urls(folder, runtime, bench)
    return results | leave(bench)


def through_urls(folder: Path, runtime: Runtime, bench: Bench) -> dict[str, Any]:
    """Use the same server as an external server."""
    assert bench.engine is not None
    endpoint = bench.engine.endpoints[0]
    os.environ["MEGAPPO_SGLANG_API_KEY"] = endpoint.key
    other = Bench(
        folder / "urls",
        runtime,
        "llama",
        f"placement: disaggregated, urls: ['{endpoint.url}']",
        tie_word_embeddings=True,
    )
    with patch.object(inspection, "own_stack", lambda environment: replace(own_stack(environment), torch="1.2.3")):
        refusal = refused(lambda: after_an_update(other, "{tensor_parallel: 2}"))
    return after_an_update(other, "{tensor_parallel: 2}") | {"refusal": refusal}


def relatives(session: int) -> int:
    """Return the number of processes in the session of a server that have libc at the same address as the server.
    These are the server and its forks. A spawned process has a different address."""

    def place(pid: int) -> str:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return next((line.split("-")[0] for line in lines if "/libc.so" in line), "")

    return sum(place(pid) == place(session) != "" for pid in session_pids(session))


def listening(pids: list[int]) -> list[str]:
    """Return the addresses on which these processes listen."""
    sockets = [s for pid in pids for s in psutil.Process(pid).net_connections() if s.status == psutil.CONN_LISTEN]
    return sorted({s.laddr.ip for s in sockets})


def nccl_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that must be equal at both ends of a group."""
    return [f"{name}={environment[name]}" for name in SETTINGS if name in environment]


def refused(action: Callable[[], object]) -> str:
    """Return the error message of the engine, or "" without an error."""
    try:
        action()
    except EngineError as error:
        return str(error)
    return ""


def leave(bench: Bench) -> dict[str, Any]:
    """Return facts about the servers of this rank, then close the engine."""
    sessions = bench.sessions()
    forked = [relatives(session) for session in sessions]
    files = sorted(shared_files([pid for s in sessions for pid in session_pids(s)]))
    assert bench.engine is not None
    urls = [e.url for e in bench.engine.endpoints]
    addresses = listening([pid for s in sessions for pid in session_pids(s)])
    fleet = bench.engine.fleet
    folders = [str(server.scratch) for server in (*fleet.servers.values(), *fleet.parts.values())]
    assert all(Path(folder).is_dir() for folder in folders)
    logs = [server.log for server in (*fleet.servers.values(), *fleet.parts.values())]
    facts = [call(e, "/server_info", timeout_seconds=60, method="GET") for e in bench.engine.endpoints]
    known: dict[str, Any] = {"deterministic": [fact["enable_deterministic_inference"] for fact in facts]}
    known["sleeps"] = [fact["sleep_on_idle"] for fact in facts]
    known["tokens"] = [fact["max_total_num_tokens"] for fact in facts]
    known["nccl"] = [sorted(nccl_variables(psutil.Process(session).environ())) for session in sessions]
    known["trainer_nccl"] = sorted(nccl_variables(os.environ))
    known["compiler"] = ["cutlass" in Path(f"/proc/{session}/maps").read_text() for session in sessions]
    info = ServerInfo(max_total_num_tokens=facts[0]["max_total_num_tokens"])
    known["too_long"] = refused(lambda: check_room("server 0", info, PlannedCache(None, CACHE_TOKENS + 1)))
    dist.barrier()  # every rank sends requests to all servers and closes its own servers
    bench.engine.close()
    known["logs"] = [log.read_text(errors="replace") for log in logs]
    places = {"urls": urls, "folders": folders, "files": files, "addresses": addresses}
    return known | {"sessions": sessions, "forked": forked, "trainer_addresses": listening([os.getpid()])} | places


def main() -> None:
    scenario, out = sys.argv[1], Path(sys.argv[2])
    config = load_config(ROOT / "configs/sglang_quickstart.yaml", ["runtime.collective_timeout_seconds=300"])
    with start_runtime(config.runtime, with_servers=True) as runtime:
        results = globals()[scenario](out.parent, runtime)
        gathered: list[Any] = [None] * runtime.world_size
        dist.all_gather_object(gathered, results)
        if runtime.is_main:
            out.write_text(json.dumps(gathered))


if __name__ == "__main__":
    assert VOCAB == 131
    main()
