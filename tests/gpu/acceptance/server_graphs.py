"""CUDA graphs of a server, with the settings of megappo and with the defaults of SGLang."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megappo.engines.sglang.client import call
from megappo.engines.sglang.servers.server import CACHES, WEIGHTS, Server, start_server
from megappo.engines.sglang.servers.spec import ServerSpec
from megappo.models.model_files import read_architecture
from megappo.runtime.device import device_bytes
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.servers import check_sglang, server_settings
from tests.gpu.acceptance.table import Row, judged, measured
from tests.gpu.acceptance.workload import Size, make_config, model_folder, settings

AS_SGLANG = {"cuda-graph-backend-prefill": "breakable", "cuda-graph-max-bs-decode": None}
_PROMPT_TOKENS = 16
_SECONDS = 120.0
_SAME = 0.99
"""Minimum share of greedy first tokens that are equal with graphs. Near ties may change."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one server."""

    seconds: float
    """Seconds until the server answers."""
    rates: dict[int, float]
    """Tokens per second by the number of sequences."""
    first_tokens: list[int]
    """Greedy token after each of the long prompts."""
    awake_bytes: int
    """Decrease of free device memory while the server is awake."""
    asleep_bytes: int


def configured_and_default(place: Place) -> Iterator[Row]:
    """Measure decoding for several numbers of sequences, answers to long prompts, and memory during sleep, for both
    settings."""
    check_sglang()
    folder = model_folder(place, "0.6B")
    ours = yield from _rows("as asked for", place, folder, {}, {})
    theirs = yield from _rows("SGLang's own", place, folder, AS_SGLANG, {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "0"})
    same = sum(a == b for a, b in zip(ours.first_tokens, theirs.first_tokens, strict=True)) / len(ours.first_tokens)
    text = f"{same:.1%} of {len(ours.first_tokens)} greedy tokens after prompts of many lengths are the same"
    yield judged("graphs of prefill", same >= _SAME, text, same=same)


def _rows(
    what: str, place: Place, folder: Path, arguments: dict[str, Any], environment: dict[str, str]
) -> Generator[Row, None, Measured]:
    stats = _measure(place, folder, arguments, environment)
    rates = ", ".join(f"{rate:.0f} with {n} sequences" for n, rate in stats.rates.items())
    yield measured(f"{what}: start", f"{stats.seconds:.1f} s", seconds=stats.seconds)
    yield measured(f"{what}: tokens/s", rates, **{f"with_{n}": rate for n, rate in stats.rates.items()})
    yield measured(f"{what}: memory", f"{stats.awake_bytes / 1e9:.2f} GB awake, {stats.asleep_bytes / 1e9:.2f} asleep",
                   awake_bytes=stats.awake_bytes, asleep_bytes=stats.asleep_bytes)  # fmt: skip
    return stats


def _measure(place: Place, folder: Path, arguments: dict[str, Any], environment: dict[str, str]) -> Measured:
    """Start a server with random weights and measure."""
    counts = (2, 4) if place.tiny else (256, 512)
    decoded = 4 if place.tiny else 128
    before = _free()
    with _server(place, folder, max(counts), arguments, environment) as (server, seconds):
        vocab = read_architecture(folder).vocab_size
        g = torch.Generator().manual_seed(3)
        rates = {}
        for count in counts:
            prompts = torch.randint(2, vocab, (count, _PROMPT_TOKENS), generator=g).tolist()
            _generate(server, prompts, decoded // 4, temperature=1.0)
            started = time.monotonic()
            _generate(server, prompts, decoded, temperature=1.0)
            rates[count] = count * decoded / (time.monotonic() - started)
        longest = 64 if place.tiny else 4096
        lengths = torch.randint(longest // 4, longest, (8 if place.tiny else 200,), generator=g).tolist()
        long = [torch.randint(2, vocab, (n,), generator=g).tolist() for n in lengths]
        tokens = [answer["output_ids"][0] for answer in _generate(server, long, 1, temperature=0.0)]
        awake = _free()
        if place.device == "cuda":
            server.release([*CACHES, *WEIGHTS])
        asleep = _free()
    return Measured(seconds, rates, tokens, before - awake, before - asleep)


@contextmanager
def _server(
    place: Place, folder: Path, sequences: int, arguments: dict[str, Any], environment: dict[str, str]
) -> Iterator[tuple[Server, float]]:
    """Start a server with the weights of the folder. Yield the server and the seconds of its start."""
    content = settings(place, folder, Size(sequences, 8, 16), "float32" if place.device == "cpu" else "bfloat16")
    server_options = server_settings(place)
    if not place.tiny:
        server_options["max_total_tokens"] = 600_000
    server_options["arguments"] = server_options.get("arguments", {}) | {"load-format": "auto"} | arguments
    server_options["environment"] = server_options.get("environment", {}) | environment
    content["rollout"] |= {"engine": None, "servers": server_options}
    on_cuda = place.device == "cuda"
    spec = ServerSpec.of(make_config(place, content), folder, (1,), on_cuda=on_cuda, device_bytes=device_bytes())
    started = time.monotonic()
    server = start_server(replace(spec, devices=(0,) if on_cuda else (), cores=(0,)), 0, 0, 1)
    try:
        server.wait_ready()
        yield server, time.monotonic() - started
    finally:
        server.stop()


def _generate(server: Server, prompts: Sequence[list[int]], tokens: int, *, temperature: float) -> list[dict[str, Any]]:
    """Generate all answers in one request, without early ends."""
    chosen = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": list(prompts), "sampling_params": chosen}
    answer: list[dict[str, Any]] = call(server.endpoint, "/generate", body, timeout_seconds=_SECONDS)["answer"]
    return answer


def _free() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
