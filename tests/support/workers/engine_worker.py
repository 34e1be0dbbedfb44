"""Real SGLang servers, given weights by real Megatron actors; see test_engines.py.

Usage (under torchrun, two processes): engine_worker.py SCENARIO OUT.json

Each scenario starts its servers once and runs every check on them. What a check found is written as numbers and words
for the test to judge.
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
from tests.support.in_flight_servers import broken_off, held, struck_in_flight
from tests.support.models import VOCAB, write_model
from tests.support.places import ROOT
from tests.support.rewards import given_scores

SHORT_WAITS = "stall_timeout_seconds: 3, health_timeout_seconds: 10, sync_timeout_seconds: 60"
CACHE_TOKENS = 16384
APART = "{ranks: 1, first_rank: 1}"
LONG = SamplingParams(temperature=1.0, max_new_tokens=50, stop_token_ids=(1,))


class Bench:
    """One configuration's servers, and actors of any layout that use them."""

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
            "algorithm.mismatch_stop_nats=100",  # of a server that has not been given the update
            "logging={console: quiet, tensorboard: false}",
            "evaluation=null",
            "data.validation=null",
        ]
        self.engine: SGLangEngine | None = None
        self.weights: WeightStream | None = None
        """Of the newest actor."""
        self.made = 0

    def trainer(self, layout: str) -> Trainer:
        """A new actor, its engine the servers that run already; a critic only where another rank needs a role."""
        self.made += 1
        overrides = [*self.overrides, f"actor.layout={layout}", f"run.directory={self.folder / str(self.made)}"]
        critic = ["critic.layout={ranks: 1}", "critic.minibatch_sequences=40", "critic.microbatch_budget_tokens=2048"]
        overrides += critic if layout == APART else ["critic=null", "algorithm.estimator=grpo"]
        config = load_config(ROOT / "configs/sglang_quickstart.yaml", overrides)
        make = megappo.ppo.components.make_engine if self.engine is None else lambda *_: self.engine
        with given_scores(), patch.object(megappo.ppo.components, "make_engine", make):
            parts = assemble(config, derive_run(config, self.runtime.world_size), self.runtime)
        assert isinstance(parts.engine, SGLangEngine)
        self.engine, self.weights = parts.engine, parts.weights
        return Trainer(parts, Reporter(config, parts.derived, self.runtime))

    def sessions(self) -> list[int]:
        """Process ids of this rank's servers and parts of servers."""
        assert self.engine is not None
        fleet = self.engine.fleet
        return [server.session for server in (*fleet.servers.values(), *fleet.parts.values())]


def after_an_update(bench: Bench, layout: str) -> dict[str, Any]:
    """Sync, step the optimizer, sync, sample: how far the engine is from the trainer then."""
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
    """What this rank should receive in a sync."""
    engine, holdings = parts.engine, parts.weights.holdings
    assert isinstance(engine, SGLangEngine)
    feeding = engine.fleet.feeding
    receivers = {r for e in engine.endpoints for r in feeding.feeders(e.index, holdings.grid)}
    mine = [r for r in receivers if r.rank == parts.runtime.rank and not feeding.shares_memory]
    return sum(holdings.sources(r, 4).total() for r in mine)


@contextmanager
def counted(weights: WeightStream) -> Iterator[list[int]]:
    """How many buckets this rank has something of."""
    count, deliver = [0], weights.deliver

    def counting(*arguments: Any) -> None:
        count[0] += 1
        deliver(*arguments)

    with patch.object(weights, "deliver", counting):
        yield count


def score_by_length(rollouts: Any) -> Any:
    return rollouts.response_lengths_B.float() % 5


def mismatch(parts: RunComponents, trainer: Trainer, step: int) -> float:
    """Largest gap between engine and trainer on a fresh batch, in nats."""
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
    """Server 0 gets a signal while it generates this rank's first requests and before it has the last of them, so that
    it always owes an answer, however fast it is."""
    assert bench.engine is not None
    (url,) = (f"{endpoint.url}/generate" for endpoint in bench.engine.endpoints if endpoint.index == 0)
    original, asked = ClientSession.post, [0]

    @asynccontextmanager
    async def post(self: ClientSession, to: str, **given: Any) -> AsyncIterator[Any]:
        asked[0] += to == url
        if to == url and asked[0] == 2:
            await asyncio.sleep(0.1)
            for pid in session_pids(bench.sessions()[0]):
                os.kill(pid, number)
        async with original(self, to, **given) as answer:
            yield answer

    with patch.object(ClientSession, "post", post):
        yield


def disturbed_rollout(bench: Bench, number: int) -> dict[str, Any]:
    """The same requests undisturbed and with a server struck down in the middle."""
    engine, rank = bench.engine, bench.runtime.rank
    assert engine is not None and bench.weights is not None
    calm = engine.generate(requests(rank), LONG)
    restarts = engine.restarts
    with struck(bench, number) if rank == 0 else nullcontext():
        rough = engine.generate(requests(rank), LONG)
    survivors = sorted(engine.current)
    engine.update_weights(bench.weights, engine.version)  # to servers that were started again, too
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
    """The same requests with and without a text that ends them, which stands in one of the answers. Most tokens have no
    text, so that a text has mostly more tokens than its own."""
    engine, tokenizer = bench.engine, AutoTokenizer.from_pretrained(ROOT / "configs/models/tiny_arithmetic")
    assert engine is not None
    asked, free = requests(bench.runtime.rank), replace(LONG, stop_token_ids=())
    whole = engine.generate(asked, free)
    text = next(m[0] for c in whole if (m := re.search(r"\d\d", tokenizer.decode(c.token_ids))))
    found = engine.generate(asked, replace(free, stop_texts=StopTexts((text,), tokenizer)))
    ends = []
    for answer in whole:
        ids = answer.token_ids
        texts = [tokenizer.decode(ids[: n + 1], skip_special_tokens=False) for n in range(len(ids))]
        ends.append(next((n + 1 for n, so_far in enumerate(texts) if text in so_far), 0))
    return {
        "ends": ends,
        "whole": [len(c.token_ids) for c in whole],
        "lengths": [len(c.token_ids) for c in found],
        "same_tokens": all(w.token_ids[: len(c.token_ids)] == c.token_ids for w, c in zip(whole, found, strict=True)),
        "gap": max(
            abs(x - y) for w, c in zip(whole, found, strict=True) for x, y in zip(w.logprobs, c.logprobs, strict=False)
        ),
        "truncated": [c.truncated for c in found if len(c.token_ids) < LONG.max_new_tokens],
    }


def of_at_least(bench: Bench) -> dict[str, Any]:
    """Two tokens of samples of one prompt, where all but two of the tokens end an answer, and not before the second."""
    engine = bench.engine
    assert engine is not None
    asked = [replace(request, token_ids=(5, 6, 7)) for request in requests(bench.runtime.rank)]
    ends = tuple(token for token in range(VOCAB) if token not in (3, 4))
    params = replace(LONG, max_new_tokens=2, stop_token_ids=ends)
    found = engine.generate(asked, replace(params, min_new_tokens=1))
    first = {c.token_ids[0]: c.logprobs[0] for c in found}
    return {
        "first": sorted(first),
        "sum": sum(math.exp(x) for x in first.values()),
        "later": len({c.token_ids[1] for c in found}),
        "unbound": len({c.token_ids[0] for c in engine.generate(asked, params)}),
    }


@contextmanager
def loading(replacement: Callable[[Loaded], Loaded]) -> Iterator[None]:
    """Parcels go through `replacement` on their way."""
    shared, broadcast = SharedTransport.prepare, BroadcastTransport.prepare
    with (
        patch.object(SharedTransport, "prepare", lambda self, p, others: shared(self, replacement(p), others)),
        patch.object(BroadcastTransport, "prepare", lambda self, p, others: broadcast(self, replacement(p), others)),
    ):
        yield


def corrupted_sync(trainer: Trainer, victim: str, times: int) -> dict[str, Any]:
    """One number of one tensor changes on its way, so many times."""
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
    """A new actor whose weights have the version after those of its engine."""
    trainer = bench.trainer(layout)
    trainer.weight_version = trainer.parts.engine.version
    return trainer


def cut_sync(bench: Bench, trainer: Trainer, victim: int = 0) -> dict[str, Any]:
    """A server, or this rank's part of it, is killed when some of the buckets are in it."""
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
    """Llama, two servers of one rank each, one looked after by each trainer rank."""
    bench = Bench(folder, runtime, "llama", "engines: 2", tie_word_embeddings=False)
    bench.overrides.append("rollout.stop=[no model says so]")  # so that servers know the texts of tokens
    found: dict[str, Any] = {"TP2": after_an_update(bench, "{tensor_parallel: 2}")}
    found["texts"] = ended_by_texts(bench)
    found["least"] = of_at_least(bench)
    found["kill"] = disturbed_rollout(bench, signal.SIGKILL)
    found["PP2"] = after_an_update(bench, "{pipeline_parallel: 2}")
    trainer = following(bench, "{tensor_parallel: 2}")
    found["in_flight"] = broken_off(trainer, requests(runtime.rank))
    found["retract"] = held(trainer, requests(runtime.rank), "retract")
    found["in_place"] = held(trainer, requests(runtime.rank), "in_place")
    found["cut"] = cut_sync(bench, trainer)
    victim = "model.layers.2.mlp.up_proj.weight"
    found["once"] = corrupted_sync(trainer, victim, 1)
    found["always"] = corrupted_sync(trainer, victim, 99)
    return found | leave(bench)


def struck_engines(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """The same servers, one of which hangs in a rollout and dies with prompts in flight."""
    bench = Bench(folder, runtime, "llama", "engines: 2", tie_word_embeddings=False)
    found: dict[str, Any] = {"PP2": after_an_update(bench, "{pipeline_parallel: 2}")}
    found["stop"] = disturbed_rollout(bench, signal.SIGSTOP)
    trainer = following(bench, "{tensor_parallel: 2}")
    trainer.sync_weights()  # which the engine's answers are compared with
    found["in_flight_killed"] = struck_in_flight(trainer, requests(runtime.rank), bench.sessions())
    return found | leave(bench)


@contextmanager
def recorded(events: list[str]) -> Iterator[None]:
    """What this rank asks of servers, parts of memory by their names, and when it gives back torch's cache; what it
    asks several times running stands there once."""
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
    """As on GPUs and between machines: each rank receives what the rank of the server beside it wants, and hands its
    own memory over."""
    return patch.object(Feeding, "shares_memory", False)


def asleep_and_awake(bench: Bench, layout: str) -> dict[str, Any]:
    """The server sleeps between two syncs."""
    trainer = bench.trainer(layout)
    engine, events = trainer.parts.engine, list[str]()
    assert isinstance(engine, SGLangEngine)
    trainer.weight_version = engine.version
    with recorded(events):
        engine.sleep()
        trainer.sync_weights()
    return {"events": events, "mismatch": mismatch(trainer.parts, trainer, 4), "restarts": engine.restarts}


def sharded_engine(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Qwen3 with tied embeddings, one server of two ranks, which gives its memory away as if it were on the trainers'
    GPUs: SGLang does everything but that."""
    with patch.object(RolloutSettings, "servers_sleep", lambda *_, **__: True):
        bench = Bench(folder, runtime, "qwen3", "tensor_parallel: 2", tie_word_embeddings=True)
        found: dict[str, Any] = {"TP2": after_an_update(bench, "{tensor_parallel: 2}")}
    found["PP2"] = after_an_update(bench, "{pipeline_parallel: 2}")
    with by_messages():
        found["PP2-messages"] = after_an_update(bench, "{pipeline_parallel: 2}")
        found["apart-messages"] = after_an_update(bench, APART)
    found["asleep"] = asleep_and_awake(bench, "{tensor_parallel: 2}")
    return found | leave(bench)


@contextmanager
def machine_of_ones_own(runtime: Runtime) -> Iterator[None]:
    """Each rank as if it were on another machine; servers know nothing of that."""
    with patch.object(socket, "gethostname", lambda: f"n{runtime.rank}"):
        yield


def experts_engine(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Qwen3 with experts, one server of two ranks on a machine each, which share out the matrices of experts."""
    served = "tensor_parallel: 2, nodes: 2"
    with machine_of_ones_own(runtime):
        bench = Bench(folder, runtime, "qwen3_moe", served, tie_word_embeddings=False)
        found: dict[str, Any] = {"EP2": after_an_update(bench, "{expert_parallel: 2}")}
    found["cut"] = cut_sync(bench, following(bench, "{expert_parallel: 2}"), victim=1)
    return found | leave(bench)


def attending_engine(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """The same with ranks that share out the experts and attend to requests of their own."""
    served = "tensor_parallel: 2, expert_parallel: 2, data_parallel_attention: 2, nodes: 2"
    with machine_of_ones_own(runtime):
        bench = Bench(folder, runtime, "qwen3_moe", served, tie_word_embeddings=False)
        layout = "{tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}"
        found = {"TP2xEP2": after_an_update(bench, layout)}
    return found | leave(bench)


def mixtral_engine(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Mixtral, whose files have names of their own, one server of two ranks."""
    bench = Bench(folder, runtime, "mixtral", "tensor_parallel: 2", tie_word_embeddings=False)
    found: dict[str, Any] = {"EP2": after_an_update(bench, "{expert_parallel: 2}")}
    return found | leave(bench)


def glm_engine(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """GLM, whose first layer has no experts and whose routers have biases, one server of two ranks."""
    bench = Bench(folder, runtime, "glm4_moe", "tensor_parallel: 2", tie_word_embeddings=False)
    found: dict[str, Any] = {"PP2": after_an_update(bench, "{pipeline_parallel: 2}")}
    return found | leave(bench)


def plain_engine(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Llama, one server of one rank that takes no seeds, as those on GPUs are by default."""
    bench = Bench(folder, runtime, "llama", "deterministic: false", tie_word_embeddings=True)
    found: dict[str, Any] = {"TP2": after_an_update(bench, "{tensor_parallel: 2}")}
    return found | leave(bench)


def broadcast_engine(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Llama with tied embeddings, weights through a broadcast group."""
    bench = Bench(folder, runtime, "llama", "placement: disaggregated", tie_word_embeddings=True)
    found: dict[str, Any] = {"TP2": after_an_update(bench, "{tensor_parallel: 2}")}
    found["kill"] = disturbed_rollout(bench, signal.SIGKILL)
    found["DP2"] = after_an_update(bench, "{}")
    found["PP2"] = after_an_update(bench, "{pipeline_parallel: 2}")
    found["cut"] = cut_sync(bench, following(bench, "{pipeline_parallel: 2}"))
    found["apart"] = after_an_update(bench, APART)
    found["external"] = through_urls(folder, runtime, bench)
    return found | leave(bench)


def through_urls(folder: Path, runtime: Runtime, bench: Bench) -> dict[str, Any]:
    """The same server again, as one that somebody else started."""
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
    """Processes of a server's session that have libc where the server has it: itself and what was forked off it.
    A process that was spawned draws an address of its own."""

    def place(pid: int) -> str:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return next((line.split("-")[0] for line in lines if "/libc.so" in line), "")

    return sum(place(pid) == place(session) != "" for pid in session_pids(session))


def listening(pids: list[int]) -> list[str]:
    """Addresses that these processes listen on."""
    sockets = [s for pid in pids for s in psutil.Process(pid).net_connections() if s.status == psutil.CONN_LISTEN]
    return sorted({s.laddr.ip for s in sockets})


def nccl_variables(environment: Mapping[str, str]) -> list[str]:
    """Those that both ends of a group must share."""
    return [f"{name}={environment[name]}" for name in SETTINGS if name in environment]


def refused(action: Callable[[], object]) -> str:
    """The sentence of the engine's error; empty without one."""
    try:
        action()
    except EngineError as error:
        return str(error)
    return ""


def leave(bench: Bench) -> dict[str, Any]:
    """What this rank's servers had made, then their end."""
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
    held = ServerInfo(max_total_num_tokens=facts[0]["max_total_num_tokens"])
    known["too_long"] = refused(lambda: check_room("server 0", held, PlannedCache(None, CACHE_TOKENS + 1)))
    dist.barrier()  # every rank asks all servers, and ends its own
    bench.engine.close()
    known["logs"] = [log.read_text(errors="replace") for log in logs]
    places = {"urls": urls, "folders": folders, "files": files, "addresses": addresses}
    return known | {"sessions": sessions, "forked": forked, "trainer_addresses": listening([os.getpid()])} | places


def main() -> None:
    scenario, out = sys.argv[1], Path(sys.argv[2])
    config = load_config(ROOT / "configs/sglang_quickstart.yaml", ["runtime.collective_timeout_seconds=300"])
    with start_runtime(config.runtime, with_servers=True) as runtime:
        found = globals()[scenario](out.parent, runtime)
        gathered: list[Any] = [None] * runtime.world_size
        dist.all_gather_object(gathered, found)
        if runtime.is_main:
            out.write_text(json.dumps(gathered))


if __name__ == "__main__":
    assert VOCAB == 131
    main()
