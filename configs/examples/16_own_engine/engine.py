"""An engine in the process of the trainer. A separate thread generates, so the trainer computes in parallel."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.config.sections.engine import EngineCapabilities
from megappo.engines.base import EngineBase
from megappo.engines.protocol import Completion, GenerateRequest, PauseMode, SamplingParams, SyncReport


class ThreadedEngine(EngineBase):
    capabilities = EngineCapabilities(concurrent=True)

    def __init__(self, *, folder: Any, runtime: Any, stop: Any, **_: Any) -> None:
        super().__init__()
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        self._model: Any = model.to(runtime.device).eval()
        self._stop, self._pool = stop, ThreadPoolExecutor(1)
        self._requests, self._aborts = set[Future[Completion]](), False
        self.replicas = [runtime.rank]  # the trainer compares a response with the actor after each sync

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        futures = [self._pool.submit(self._answer, request, params) for request in requests]
        self._requests |= set(futures)
        return futures

    @torch.inference_mode()
    def _answer(self, request: GenerateRequest, params: SamplingParams) -> Completion:
        generator = torch.Generator().manual_seed(request.seed)
        ids, logprobs, most = list(request.token_ids), list[float](), request.most_tokens(params)
        while not self._aborts and len(logprobs) < most and not (logprobs and ids[-1] in params.stop_token_ids):
            logits_V = self._model(torch.tensor([ids], device=self._model.device)).logits[0, -1].float().cpu()
            logprob_V = (logits_V / params.temperature).log_softmax(-1)
            sample = torch.multinomial(logprob_V.exp(), 1, generator=generator)
            ids.append(int(logprob_V.argmax() if params.greedy else sample))
            logprobs.append(float(logprob_V[ids[-1]]))
            self.on_tokens()
        tokens = tuple(ids[len(request.token_ids) :])
        is_complete = bool(tokens) and tokens[-1] in params.stop_token_ids
        is_cut = not is_complete and len(tokens) < most
        return Completion(tokens, tuple(logprobs), not is_complete and not is_cut, self.version, broken_off=is_cut)

    def poll(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
        self._requests = wait(self._requests, wait_seconds).not_done
        self._stop.check()  # raises on every rank if the run must stop

    def pause(self, mode: PauseMode) -> None:
        self._aborts = True
        wait(self._requests)

    def update_weights(self, named_tensors: Any, version: int) -> SyncReport:
        parameters = dict(self._model.named_parameters())
        for name, tensor in named_tensors:
            parameters[name].data.copy_(tensor)
        self.version, self._aborts = version, False
        return SyncReport.gather([{}])  # or the seconds by phase
