"""The servers of a configuration, and checks of syncs and generation on these servers."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from aiohttp import ClientSession
from transformers import AutoTokenizer

import megappo.ppo.assembly.components
from megappo.config import derive_run, load_config
from megappo.engines.protocol import GenerateRequest, SamplingParams
from megappo.engines.requests import generate
from megappo.engines.sglang.engine import SGLangEngine, SyncError
from megappo.engines.sglang.servers.guard import session_pids
from megappo.engines.sglang.weights.transport import BroadcastTransport, Loaded, SharedTransport, share_buffers
from megappo.megatron.placed import announce, place
from megappo.models.stop_texts import StopTexts
from megappo.ppo.assembly.components import RunComponents, assemble
from megappo.ppo.reports.measures import check_mismatch
from megappo.ppo.reports.reporting import Reporter
from megappo.ppo.trainer import Trainer
from megappo.reshard.stream import WeightStream
from megappo.runtime.process import Runtime
from tests.support.models import VOCAB, write_model
from tests.support.places import ROOT
from tests.support.rewards import without_reward_workers

SHORT_WAITS = "stall_timeout_seconds: 3, health_timeout_seconds: 10, sync_timeout_seconds: 60"
CACHE_TOKENS = 16384
APART = "{ranks: 1, first_rank: 1}"
LONG = SamplingParams(temperature=1.0, max_new_tokens=50, stop_token_ids=(1,))


PHASES = ("gather", "load", "verify", "session", "wake")


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
            f"rollout.servers={{max_total_tokens: {CACHE_TOKENS}, threads: 1, {SHORT_WAITS}, {sglang}}}",
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
        make = megappo.ppo.assembly.components.make_engine if self.engine is None else lambda *_: self.engine
        with without_reward_workers(), patch.object(megappo.ppo.assembly.components, "make_engine", make):
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
    first, wake = trainer.metrics["sync/probe_gap"], trainer.metrics["sync/wake_seconds"]
    trainer.step = 1
    rollouts = trainer.responses.of_step(1, weights_changed=False)
    placed, scored = trainer.forward(rollouts, score_by_length(rollouts))
    trainer.update_actor(placed, trainer.estimate_advantages(scored))
    before = mismatch(parts, trainer, 2)
    trainer.weight_version = parts.engine.version
    trainer.sync_weights()
    return {
        "probe": max(first, trainer.metrics["sync/probe_gap"]), "without_sync": before,
        "after_sync": mismatch(parts, trainer, 3), "buckets": float(count[0]), "received": parts.weights.received_bytes,
        "planned": 2 * planned_bytes(parts), "model": parts.weights.total_bytes,
        "replayed": trainer.metrics.get("mismatch/router_replayed", 0.0),
        "changed": trainer.metrics.get("mismatch/router_changed", 0.0), "version": float(parts.engine.version),
        "wake": wake,
        "phases": sum(trainer.metrics[f"sync/{p}_seconds"] for p in PHASES) / trainer.metrics["sync/seconds"],
    }  # fmt: skip


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
    calm = generate(engine, requests(rank), LONG)
    restarts = engine.usage.restarts
    with struck(bench, number) if rank == 0 else nullcontext():
        rough = generate(engine, requests(rank), LONG)
    current = sorted(engine.current)
    engine.update_weights(bench.weights, engine.version)  # includes restarted servers
    again = generate(engine, requests(rank), LONG)
    return {
        "answers": len(rough),
        "same_tokens": [c.token_ids for c in calm] == [c.token_ids for c in rough] == [c.token_ids for c in again],
        "logprob_gap": max(
            abs(x - y) for a, b in zip(calm, rough, strict=True) for x, y in zip(a.logprobs, b.logprobs, strict=False)
        ),
        "current": current,
        "restarts": engine.usage.restarts - restarts,
        "versions": sorted({c.weight_version for c in rough}),
        "version": engine.version,
    }


def ended_by_texts(bench: Bench) -> dict[str, Any]:
    """Compare the answers to the same requests with and without a stop text, which occurs in one of the answers. Most
    tokens have no text, so a text usually consists of several tokens."""
    engine, tokenizer = bench.engine, AutoTokenizer.from_pretrained(ROOT / "configs/models/tiny_arithmetic")
    assert engine is not None
    sent, free = requests(bench.runtime.rank), replace(LONG, stop_token_ids=())
    whole = generate(engine, sent, free)
    text = next(m[0] for c in whole if (m := re.search(r"\d\d", tokenizer.decode(c.token_ids))))
    stopped = generate(engine, sent, replace(free, stop_texts=StopTexts((text,), tokenizer)))
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
    answers = generate(engine, sent, replace(params, min_new_tokens=1))
    first = {c.token_ids[0]: c.logprobs[0] for c in answers}
    return {
        "first": sorted(first),
        "sum": sum(math.exp(x) for x in first.values()),
        "later": len({c.token_ids[1] for c in answers}),
        "unbound": len({c.token_ids[0] for c in generate(engine, sent, params)}),
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
    restarts, seen = engine.usage.restarts, [0]

    def kill(payloads: Loaded) -> Loaded:
        seen[0] += 1
        if bench.runtime.rank == victim and seen[0] == 4:
            for pid in session_pids(bench.sessions()[0]):
                os.kill(pid, signal.SIGKILL)
        return payloads

    with loading(kill):
        trainer.sync_weights()
    return {
        "restarts": engine.usage.restarts - restarts,
        "probe": trainer.metrics["sync/probe_gap"],
        "moving": (trainer.metrics["sync/gather_seconds"], trainer.metrics["sync/transfer_seconds"]),
        "speed": trainer.metrics["sync/gigabytes_per_second"] * trainer.metrics["sync/transfer_seconds"],
        "model": trainer.parts.weights.total_bytes / 1e9,
        "current": sorted(engine.current),
        "mismatch": mismatch(trainer.parts, trainer, 9),
    }
