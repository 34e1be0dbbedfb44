#!/usr/bin/env python3
"""Is a rollout as fast as its engine?

Usage: python -m benchmarks.rollout [MODEL_FOLDER] [--sequences 32] [--prompt 43] [--response 64] [--dtype bfloat16]
           [--device cuda|cpu] [--threads N] [--repeat 5] [--answers 4096] [--answer-tokens 64 512] [--json FILE]

Two questions. The embedded engine beside transformers' `generate` with its own sampling, the fastest that it has
without log-probabilities: the same random weights of the shapes in MODEL_FOLDER/config.json, the same prompts, every
response at its full length, in turns. And how many answers of a server one rank can take in a second: from a stand-in
for SGLang in a process of its own that answers at once, so that nothing but the rank's own Python is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.step import versions
from megappo.config.engine import SGLangSettings
from megappo.config.model_files import read_architecture
from megappo.config.schema import RuntimeSettings
from megappo.engines.protocol import GenerateRequest, SamplingParams
from megappo.engines.sglang.client import Endpoint
from megappo.engines.sglang.dispatch import Round, RoundLimits
from megappo.engines.transformers_engine import TransformersEngine
from megappo.runtime.deadlines import Deadlines

ROOT = Path(__file__).resolve().parents[1]

_VERSION = 7


@dataclass(frozen=True)
class Generation:
    """Seconds of all sequences."""

    sequences: int
    prompt_tokens: int
    response_tokens: int
    generate_seconds: list[float]
    """transformers' own."""
    engine_seconds: list[float]

    @property
    def speed(self) -> float:
        """Speed of the engine relative to transformers': the median of rounds that took turns."""
        return statistics.median(g / e for g, e in zip(self.generate_seconds, self.engine_seconds, strict=True))


@dataclass(frozen=True)
class Answers:
    """Responses that one rank received from a server that responds at once."""

    count: int
    tokens: int
    """Tokens of each response."""
    seconds: list[float]
    """Seconds until the last response arrived."""
    cpu_seconds: list[float]
    """CPU seconds of the rank's process."""

    @property
    def per_second(self) -> float:
        return self.count / statistics.median(self.seconds)

    @property
    def per_cpu_second(self) -> float:
        return self.count / statistics.median(self.cpu_seconds)


def measure_generation(
    folder: Path, sequences: int, prompt: int, response: int, *, dtype: torch.dtype, device: torch.device, repeat: int
) -> Generation:
    """Measure both in turns, after an uncounted run of each."""
    torch.manual_seed(3)
    arch = read_architecture(folder)
    engine = TransformersEngine(arch, dtype=dtype, device=device, generate_batch_sequences=sequences)
    made = AutoModelForCausalLM.from_config(arch.hf_config, dtype=dtype, attn_implementation="sdpa")
    model: Any = made.to(device).eval().requires_grad_(False)
    model.generation_config = type(model.generation_config)()  # the folder's defaults must not interfere
    engine.update_weights(((name, p.data) for name, p in model.named_parameters()), _VERSION)
    ids = torch.randint(1, arch.vocab_size, (sequences, prompt), device=device)
    requests = [GenerateRequest(tuple(row), seed=i, prompt_id=i) for i, row in enumerate(ids.tolist())]
    params = SamplingParams(temperature=1.0, max_new_tokens=response, stop_token_ids=())

    def theirs() -> None:
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                max_new_tokens=response, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        assert out.shape == (sequences, prompt + response)

    def ours() -> None:
        assert all(len(answer.token_ids) == response for answer in engine.generate(requests, params))

    generate, own = in_turns([theirs, ours], repeat, device)
    return Generation(sequences, prompt, response, generate, own)


def in_turns(calls: list[Callable[[], None]], repeat: int, device: torch.device) -> list[list[float]]:
    """Seconds of each call, after a round that is not counted."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeat + 1):
        for found, call in zip(seconds, calls, strict=True):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
    return [found[1:] for found in seconds]


def _serve(tokens: int, ready: SimpleQueue[int]) -> None:
    """SGLang's answer to `/generate`, made once."""
    ids = [random.Random(5).randrange(150_000) for _ in range(tokens)]
    logprobs = [[-1.0 / (1 + i % 97), token, None] for i, token in enumerate(ids)]
    meta = {
        "id": "0" * 32, "finish_reason": {"type": "length", "length": tokens}, "prompt_tokens": 100,
        "weight_version": str(_VERSION), "output_token_logprobs": logprobs,
    }  # fmt: skip
    one = json.dumps({"text": "abcd" * tokens, "output_ids": ids, "meta_info": meta}).encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:  # the rank has closed the connection
                writer.close()
                return
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            asked = json.loads(await reader.readexactly(length))
            body = b"[" + b",".join([one] * len(asked["input_ids"])) + b"]"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
            writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 24)
        ready.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@contextmanager
def stand_in(tokens: int) -> Iterator[Endpoint]:
    """A server whose answers have so many tokens, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ready = context.SimpleQueue()
    process = context.Process(target=_serve, args=(tokens, ready), daemon=True)
    process.start()
    try:
        yield Endpoint(0, f"http://127.0.0.1:{ready.get()}", "key", 0)
    finally:
        process.kill()
        process.join()


def measure_answers(count: int, tokens: int, repeat: int) -> Answers:
    """Rounds as a rollout has them, after one that is not counted."""
    params = SamplingParams(temperature=1.0, max_new_tokens=tokens, stop_token_ids=(1,))
    requests = {i: GenerateRequest(tuple(range(100)), seed=i, prompt_id=i // 8) for i in range(count)}
    limits = RoundLimits.of(SGLangSettings(), Deadlines.of(RuntimeSettings()))
    seconds, cpu_seconds = [], []
    with stand_in(tokens) as endpoint:
        for _ in range(repeat + 1):
            start, cpu = time.perf_counter(), time.process_time()
            outcome = Round([endpoint], requests, params, _VERSION, limits).result()
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu)
            if len(outcome.completions) < count:
                raise RuntimeError(f"{count - len(outcome.completions)} answers did not come: {outcome.failures}")
    return Answers(count, tokens, seconds[1:], cpu_seconds[1:])


def print_tables(generation: Generation, answers: list[Answers], title: str) -> None:
    """Print the tables on the terminal."""
    made = generation.sequences * generation.response_tokens
    shape = f"{generation.sequences} sequences of {generation.prompt_tokens} + {generation.response_tokens} tokens"
    table = Table(title=f"{shape}, {title}")
    for column in ("", "median s", "min s", "max s", "tokens/s"):
        table.add_column(column, justify="right" if column else "left")
    for name, found in (("generate", generation.generate_seconds), ("embedded engine", generation.engine_seconds)):
        median = statistics.median(found)
        table.add_row(name, f"{median:.3f}", f"{min(found):.3f}", f"{max(found):.3f}", f"{made / median:.0f}")
    Console().print(table, f"the engine's speed is {generation.speed:.2f} of generate's")
    table = Table(title="answers that one rank takes")
    for column in ("tokens each", "answers", "per second", "per CPU second", "tokens per CPU second"):
        table.add_column(column, justify="right")
    for a in answers:
        numbers = (a.per_second, a.per_cpu_second, a.tokens * a.per_cpu_second)
        table.add_row(str(a.tokens), str(a.count), *(f"{number:.0f}" for number in numbers))
    Console().print(table)


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = ROOT / "configs" / "models" / "SmolLM2-135M-Instruct"
    parser.add_argument("folder", nargs="?", type=Path, default=default, metavar="MODEL_FOLDER")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=43, help="tokens")
    parser.add_argument("--response", type=int, default=64, help="tokens")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    parser.add_argument("--threads", type=int, help="of a CPU; default: all cores")
    parser.add_argument("--answers", type=int, default=4096)
    parser.add_argument("--answer-tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    given = parser.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    sizes = (given.sequences, given.prompt, given.response)
    generation = measure_generation(given.folder, *sizes, dtype=dtype, device=device, repeat=given.repeat)
    answers = [measure_answers(given.answers, tokens, given.repeat) for tokens in given.answer_tokens]
    where = torch.cuda.get_device_name() if given.device == "cuda" else f"{torch.get_num_threads()} threads"
    print_tables(generation, answers, f"{given.folder.name}, {given.dtype}, {where}, medians of {given.repeat}")
    if given.json is not None:
        found: dict[str, Any] = {"generation": {**asdict(generation), "speed": generation.speed}}
        found["answers"] = [
            {**asdict(a), "per_second": a.per_second, "per_cpu_second": a.per_cpu_second} for a in answers
        ]
        document = {"benchmark": "rollout", "model": str(given.folder), "where": where, **versions(), **found}
        given.json.write_text(json.dumps(document, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
