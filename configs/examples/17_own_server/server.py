"""A server: reads lines [number, message] and writes lines [number, ids, logprobs, truncated, interrupted]."""

import json
import queue
import sys
import threading
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1])).eval()
messages: "queue.Queue[tuple[int, dict[str, Any] | None]]" = queue.Queue()
interrupt = threading.Event()


def read() -> None:
    for number, message in map(json.loads, sys.stdin):
        if "interrupt" in message:
            interrupt.set()
        messages.put((number, message))
    messages.put((0, None))


@torch.inference_mode()
def answer(
    ids: list[int], seed: int, most: int, temperature: float, greedy: bool, stop: list[int]
) -> tuple[list[int], list[float], bool, bool]:
    generator, logprobs, start = torch.Generator().manual_seed(seed), list[float](), len(ids)
    while not interrupt.is_set() and len(logprobs) < most and not (logprobs and ids[-1] in stop):
        logprob_V = (model(torch.tensor([ids])).logits[0, -1].float() / temperature).log_softmax(-1)
        sample = torch.multinomial(logprob_V.exp(), 1, generator=generator)
        ids.append(int(logprob_V.argmax() if greedy else sample))
        logprobs.append(float(logprob_V[ids[-1]]))
    is_complete, is_full = bool(logprobs) and ids[-1] in stop, len(logprobs) == most
    return ids[start:], logprobs, is_full and not is_complete, not is_full and not is_complete


threading.Thread(target=read, daemon=True).start()
while (item := messages.get())[1] is not None:
    number, message = item
    assert message is not None
    result: tuple[list[int], list[float], bool, bool] = [], [], False, False
    if "load" in message:
        model.load_state_dict(load_file(message["load"]), strict=False)
    elif "interrupt" in message:
        interrupt.clear()
    else:
        result = answer(**message)
    print(json.dumps([number, *result]), flush=True)
