"""Custom components of a user in addition to a reward: an engine, a data source, an estimator and a policy loss.

test_outside.py trains with a copy of this file outside the repository."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.config import Config
from megappo.engines.base import BatchEngine
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams, SyncReport
from megappo.reshard.stream import WeightStream
from megappo.runtime.process import Runtime
from megappo.runtime.watch.interrupts import Stop


class PlainEngine(BatchEngine):
    """A minimal engine: transformers on every rank, one sample at a time, without a cache."""

    def __init__(
        self, *, config: Config, folder: Path, stop_token_ids: tuple[int, ...], runtime: Runtime, stop: Stop, log: str
    ) -> None:
        super().__init__(stop)
        self._log = Path(f"{log}-{runtime.rank}")
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        self._model: Any = made.to(runtime.device).eval().requires_grad_(False)

    def update_weights(self, named_tensors: WeightStream, version: int) -> SyncReport:
        parameters = dict(self._model.named_parameters())
        for name, tensor in named_tensors:
            parameters.pop(name).copy_(tensor)
        assert not parameters
        self.version = version
        return SyncReport(())

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[tuple[int, Completion]]:
        answers = [self._complete(request, params) for request in requests]
        with self._log.open("a") as log:
            print(len(answers), file=log)
        return enumerate(answers)

    def _complete(self, request: GenerateRequest, params: SamplingParams) -> Completion:
        generator = torch.Generator().manual_seed(request.seed)
        ids, logprobs = list(request.token_ids), list[float]()
        while len(logprobs) < params.max_new_tokens and (not logprobs or ids[-1] not in params.stop_token_ids):
            logp_V = (self._model(torch.tensor([ids])).logits[0, -1].float() / params.temperature).log_softmax(-1)
            drawn = logp_V.argmax() if params.greedy else torch.multinomial(logp_V.exp(), 1, generator=generator)
            ids.append(int(drawn))
            logprobs.append(float(logp_V[ids[-1]]))
            self.on_tokens()
        response = tuple(ids[len(request.token_ids) :])
        return Completion(response, tuple(logprobs), response[-1] not in params.stop_token_ids, self.version)

    def close(self) -> None:
        self._model = None


def questions(*, size: int) -> Iterator[dict[str, str]]:
    """Yield single-digit sums."""
    for number in range(size):
        yield {"prompt": f"{number % 5}+{number // 5}=", "answer": str(number % 5 + number // 5)}


def rest_of_rewards(*, rewards: Tensor, values: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return undiscounted rewards-to-go as returns, and their difference to the values of the critic as advantages."""
    returns = rewards.masked_fill(~mask, 0.0).flip(1).cumsum(1).flip(1).masked_fill(~mask, 0.0)
    return scale * (returns - values.masked_fill(~mask, 0.0)), returns


def reinforce(*, logprob: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the REINFORCE loss without a ratio and without a clip."""
    return -advantages * logprob, {"surprise": -logprob}
