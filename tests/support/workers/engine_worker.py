"""Real SGLang servers with weights from real Megatron actors; see test_engines.py.

Usage (under torchrun, two processes): engine_worker.py SCENARIO OUT.json

Each scenario starts its servers once and runs all checks on these servers. The results are written as numbers and
texts, which the test compares with its expectations.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch.distributed as dist

from megappo.config import load_config
from megappo.config.rollout import RolloutSettings
from megappo.engines.sglang.client import call
from megappo.engines.sglang.engine import SGLangEngine
from megappo.engines.sglang.servers import inspection
from megappo.engines.sglang.servers.guard import session_pids, shared_files
from megappo.engines.sglang.servers.inspection import ServerInfo, check_room
from megappo.engines.sglang.servers.server import EngineError
from megappo.plan.bytes.cache import PlannedCache
from megappo.reshard.feeding import Feeding
from megappo.runtime.process import Runtime, start_runtime
from megappo.runtime.ranks.nccl import SETTINGS, own_stack
from tests.support.in_flight_servers import aborted_by_sync, paused_by_sync, struck_in_flight
from tests.support.models import VOCAB
from tests.support.places import ROOT
from tests.support.sglang_bench import (
    APART,
    CACHE_TOKENS,
    Bench,
    after_an_update,
    corrupted_sync,
    cut_sync,
    disturbed_rollout,
    ended_by_texts,
    following,
    mismatch,
    of_at_least,
    requests,
)


def two_engines(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Run Llama with two servers of one rank each. Each trainer rank manages one server."""
    bench = Bench(folder, runtime, "llama", "count: 2", tie_word_embeddings=False)
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
    bench = Bench(folder, runtime, "llama", "count: 2", tie_word_embeddings=False)
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
    return {"events": events, "mismatch": mismatch(trainer.parts, trainer, 4), "restarts": engine.usage.restarts}


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
        folder / "urls", runtime, "llama", f"placement: disaggregated, urls: ['{endpoint.url}']",
        tie_word_embeddings=True,
    )  # fmt: skip
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
