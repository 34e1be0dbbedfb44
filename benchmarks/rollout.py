#!/usr/bin/env python3
"""Measure the speed of the embedded engine, and the number of responses that a rank can process.

Usage: python -m benchmarks.rollout [MODEL_FOLDER] [--sequences 32] [--prompt 43] [--response 64] [--dtype bfloat16]
           [--device cuda|cpu] [--threads N] [--repeat 5] [--answers 4096] [--answer-tokens 64 512] [--json FILE]

The first measurement compares the embedded engine with transformers' `generate`. `generate` uses transformers'
sampling without log-probabilities, which is its fastest mode. Both use the same random weights with the shapes of
MODEL_FOLDER/config.json, the same prompts, and full response lengths, in turns. The second measurement is the number
of responses from a server that one rank can process per second. A separate process replaces SGLang and responds
immediately, so the time is only the Python time of the rank.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.report import parser_of, print_table, versions, write_json
from megappo.config.schema import RuntimeSettings
from megappo.config.sections.engine import ServerSettings
from megappo.engines.protocol import GenerateRequest, SamplingParams
from megappo.engines.sglang.client import Endpoint
from megappo.engines.sglang.requests.dispatch import Dispatcher
from megappo.engines.sglang.requests.generation import RequestLimits
from megappo.engines.transformers_engine import TransformersEngine
from megappo.models.model_files import read_architecture
from megappo.runtime.watch.deadlines import Deadlines

ROOT = Path(__file__).resolve().parents[1]

_VERSION = 7


@dataclass(frozen=True)
class Generation:
    """Seconds for all sequences."""

    sequences: int
    prompt_tokens: int
    response_tokens: int
    generate_seconds: list[float]
    """Seconds of transformers' `generate`."""
    engine_seconds: list[float]

    @property
    def speed(self) -> float:
        """Median ratio of `generate`'s seconds to the engine's seconds in the same round."""
        return statistics.median(g / e for g, e in zip(self.generate_seconds, self.engine_seconds, strict=True))


@dataclass(frozen=True)
class Answers:
    """Responses that one rank received from a server that responds immediately."""

    count: int
    tokens: int
    """Tokens of each response."""
    seconds: list[float]
    """Seconds until the last response was received."""
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
    """Measure `generate` and the engine in turns. The first run of each is not counted."""
    torch.manual_seed(3)
    arch = read_architecture(folder)
    engine = TransformersEngine(arch, dtype=dtype, device=device, generate_batch_sequences=sequences)
    made = AutoModelForCausalLM.from_config(arch.hf_config, dtype=dtype, attn_implementation="sdpa")
    model: Any = made.to(device).eval().requires_grad_(False)
    model.generation_config = type(model.generation_config)()  # without the defaults of the folder
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
        answers = engine.submit(requests, params)
        engine.poll(0.0)
        assert all(len(answer.result().token_ids) == response for answer in answers)

    generate, own = in_turns([theirs, ours], repeat, device)
    return Generation(sequences, prompt, response, generate, own)


def in_turns(calls: list[Callable[[], None]], repeat: int, device: torch.device) -> list[list[float]]:
    """Return the seconds of each call. The first round is not counted."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeat + 1):
        for of_call, call in zip(seconds, calls, strict=True):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            of_call.append(time.perf_counter() - start)
    return [of_call[1:] for of_call in seconds]


def _serve(tokens: int, ready: SimpleQueue[int]) -> None:
    """Serve a fixed response in SGLang's format for `/generate`."""
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
            request = json.loads(await reader.readexactly(length))
            body = b"[" + b",".join([one] * len(request["input_ids"])) + b"]"
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
    """Start a process that serves responses with the given number of tokens, and yield its endpoint."""
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
    """Measure rollouts. The first rollout is not counted."""
    params = SamplingParams(temperature=1.0, max_new_tokens=tokens, stop_token_ids=(1,))
    requests = [GenerateRequest(tuple(range(100)), seed=i, prompt_id=i // 8) for i in range(count)]
    dispatcher = Dispatcher(RequestLimits.of(ServerSettings(), Deadlines.of(RuntimeSettings())), lambda: None)
    seconds, cpu_seconds = [], []
    with stand_in(tokens) as endpoint, closing(dispatcher):
        dispatcher.use([endpoint], _VERSION)
        for _ in range(repeat + 1):
            start, cpu = time.perf_counter(), time.process_time()
            dispatcher.submit(requests, params)
            while not dispatcher.wait(1.0):
                pass
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu)
            report = dispatcher.report()
            if report.answered < count:
                raise RuntimeError(f"{count - report.answered} answers are missing: {report.failures}")
    return Answers(count, tokens, seconds[1:], cpu_seconds[1:])


def print_tables(generation: Generation, answers: list[Answers], title: str) -> None:
    """Print the results as tables."""
    made = generation.sequences * generation.response_tokens
    shape = f"{generation.sequences} sequences of {generation.prompt_tokens} + {generation.response_tokens} tokens"
    cells = []
    for name, seconds in (("generate", generation.generate_seconds), ("embedded engine", generation.engine_seconds)):
        numbers = (statistics.median(seconds), min(seconds), max(seconds))
        cells.append((name, *(f"{x:.3f}" for x in numbers), f"{made / numbers[0]:.0f}"))
    print_table(f"{shape}, {title}", ("", "median s", "min s", "max s", "tokens/s"), cells)
    print(f"the engine has {generation.speed:.2f} times the speed of generate")
    cells = []
    for a in answers:
        numbers = (a.per_second, a.per_cpu_second, a.tokens * a.per_cpu_second)
        cells.append((str(a.tokens), str(a.count), *(f"{number:.0f}" for number in numbers)))
    columns = ("tokens each", "answers", "per second", "per CPU second", "tokens per CPU second")
    print_table("answers that one rank takes", columns, cells, texts=0)


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = parser_of(__doc__, has_config=False)
    default = ROOT / "configs" / "models" / "SmolLM2-135M-Instruct"
    parser.add_argument("folder", nargs="?", type=Path, default=default, metavar="MODEL_FOLDER")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=43, help="tokens")
    parser.add_argument("--response", type=int, default=64, help="tokens")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads; default: all cores")
    parser.add_argument("--answers", type=int, default=4096)
    parser.add_argument("--answer-tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    sizes = (args.sequences, args.prompt, args.response)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the update of the engine
    generation = measure_generation(args.folder, *sizes, dtype=dtype, device=device, repeat=args.repeat)
    dist.destroy_process_group()
    answers = [measure_answers(args.answers, tokens, args.repeat) for tokens in args.answer_tokens]
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} threads"
    print_tables(generation, answers, f"{args.folder.name}, {args.dtype}, {where}, medians of {args.repeat}")
    results = [{**asdict(a), "per_second": a.per_second, "per_cpu_second": a.per_cpu_second} for a in answers]
    document: dict[str, Any] = {"benchmark": "rollout", "model": str(args.folder), "where": where, **versions()}
    document |= {"generation": {**asdict(generation), "speed": generation.speed}, "answers": results}
    write_json(args, document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
