"""The embedded engine, which runs transformers' `generate` in the process of the trainer on every rank.

Shape legend: B sequences of a batch, T tokens of the longest sequence, V vocabulary, S new tokens, L layers, K
experts per token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from megappo.config import Config
from megappo.config.role_models import load_architecture
from megappo.config.sections.engine import EngineCapabilities
from megappo.engines.base import BatchEngine
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams, SyncReport
from megappo.engines.rows import check_requests
from megappo.engines.stretches import stopped
from megappo.errors import first_of
from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import model_parameters
from megappo.models.stop_texts import StopTexts
from megappo.observe.terminal.progress import PROGRESS, SAMPLES
from megappo.runtime.memory.resting import Movable
from megappo.runtime.process import Runtime
from megappo.runtime.watch.interrupts import Stop
from megappo.types import RoutingShape
from megappo_kernels.gemm import takes_grouped


class _StopRequested(Exception):
    """Raised between two tokens to leave `generate` when the run must stop."""


class _Sampler(LogitsProcessor):
    """A logits processor that samples the tokens itself and returns one-hot scores to `generate`.

    Each sequence and position has one uniform number, drawn from the seed of the sequence. The number inverts the
    cumulative distribution. A response therefore does not depend on its batch. The log-probability is recorded during
    sampling.
    """

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        device: torch.device,
        on_tokens: Callable[[], None],
        stop: Stop,
    ) -> None:
        self._params, self._on_tokens, self._stop = params, on_tokens, stop
        self._uniforms_BS = torch.stack(
            [torch.rand(params.max_new_tokens, generator=torch.Generator().manual_seed(r.seed)) for r in requests]
        ).to(device)
        self._least = [request.least_tokens(params) for request in requests]
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._on_tokens()
        if self._stop.requested:
            raise _StopRequested
        # Operate in place, because `generate` passes a float32 copy. Each pass over (B, V) costs time.
        shifted_BV = scores.float().div_(self._params.temperature)
        not_yet = [b for b, least in enumerate(self._least) if len(self.tokens) < least]
        for token in self._params.stop_token_ids if not_yet else ():
            shifted_BV[not_yet, token] = -torch.inf
        shifted_BV.sub_(shifted_BV.amax(-1, keepdim=True))
        exp_BV = shifted_BV.exp()
        sum_B1 = exp_BV.sum(-1, keepdim=True)
        if self._params.greedy:
            choice_B1 = shifted_BV.argmax(-1, keepdim=True)
        else:
            cumulative_BV = exp_BV.cumsum_(-1)
            # Stay below the total even if rounding would reach the total, so that no token of probability 0 is
            # chosen.
            total_B1 = cumulative_BV[:, -1:]
            wanted_B1 = self._uniforms_BS[:, len(self.tokens), None] * total_B1
            wanted_B1 = torch.minimum(wanted_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
            # With nan scores the search finds no token. `check_answers` reports the log-probability, which is nan
            # too.
            choice_B1 = torch.searchsorted(cumulative_BV, wanted_B1, right=True).clamp_(max=scores.shape[-1] - 1)
        self.tokens.append(choice_B1[:, 0])
        self.logprobs.append((shifted_BV.gather(1, choice_B1) - sum_B1.log())[:, 0])
        return shifted_BV.fill_(-torch.inf).scatter_(1, choice_B1, 0.0)


class _Stopper(StoppingCriteria):
    """Stop sequences that contain a stop text. The check runs after each token. `stopped` later cuts the responses
    exactly."""

    def __init__(self, texts: StopTexts, prompt_tokens: int) -> None:
        self._texts, self._prompt_tokens = texts, prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        answers = input_ids[:, self._prompt_tokens :].tolist()
        return torch.tensor([self._texts.ends_now(ids) for ids in answers], device=input_ids.device)


def _destinations(model: nn.Module, arch: ArchitectureConfig) -> dict[str, Tensor]:
    """Return the memory of each tensor of the weight stream in the model. transformers may pack the experts of a
    layer into one parameter, and may use other parameter names than the checkpoint files."""
    held = {name: parameter.data for name, parameter in model.named_parameters()}
    of_map = {name for parameter in model_parameters(arch, experts=()) for name in parameter.hf}
    held |= {name: buffer for name, buffer in model.named_buffers() if name in of_map}
    found: dict[str, Tensor] = {}
    packed = [parameter for parameter in model_parameters(arch) if parameter.packed in held]
    for parameter in packed:
        rows, whole = [shape[0] for shape in parameter.shapes], held[parameter.packed]
        own = whole if parameter.expert is None else whole[parameter.expert]
        turns = len(parameter.hf)
        parts = [own.t()[n::turns] for n in range(turns)] if parameter.interleaved else own.split(rows)
        found |= zip(parameter.hf, parts, strict=True)
    return found | {name: held[name] for name in held.keys() - {parameter.packed for parameter in packed}}


@contextmanager
def _noted_experts(
    model: nn.Module, arch: ArchitectureConfig, shape: RoutingShape | None
) -> Iterator[list[list[Tensor]]]:
    """Record the experts that the router of each layer selects in the context, per call, with shape (tokens, K).
    Records nothing if `shape` is None."""
    noted: list[list[Tensor]] = []
    held = {name for name, _ in model.named_parameters()}
    with ExitStack() as hooks:
        for parameter in model_parameters(arch, experts=()) if shape is not None else ():
            if parameter.megatron.endswith(".router.weight"):
                noted.append([])
                name = parameter.packed if parameter.packed in held else parameter.hf[0]
                router = model.get_submodule(name.removesuffix(".weight"))
                hooks.callback(router.register_forward_hook(partial(_note, noted[-1])).remove)
        yield noted


def _note(
    noted: list[Tensor], _router: nn.Module, _inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Record the third output of the router. transformers' routers return logits, weights and experts."""
    noted.append(output[2])


def _with_routing(
    requests: Sequence[GenerateRequest],
    completions: Sequence[Completion],
    noted: list[list[Tensor]],
    shape: RoutingShape,
) -> list[Completion]:
    """Add the experts of each token to the answers. The model processes the prompts in one call, padded on the left,
    and then one new token per call. The last token is not computed. Layers without experts come first."""
    of_layers = [torch.cat([x.unflatten(0, (len(requests), -1)) for x in calls], dim=1) for calls in noted]
    chosen_BTLK = torch.stack(of_layers, dim=2).to("cpu", shape.dtype)
    nobodys_TLK = shape.unknown(chosen_BTLK.shape[1], shape.layers - len(noted))
    routing_BTLK = torch.cat([nobodys_TLK.expand(len(requests), -1, -1, -1), chosen_BTLK], dim=2)
    longest, found = max(len(r.token_ids) for r in requests), []
    for request, answer, routing_TLK in zip(requests, completions, routing_BTLK, strict=True):
        first, computed = longest - len(request.token_ids), len(request.token_ids) + len(answer.token_ids) - 1
        found.append(replace(answer, routing=routing_TLK[first : first + computed].clone()))
    return found


class TransformersEngine(BatchEngine):
    """A `BatchEngine` on transformers' `generate`. Weights arrive only through the weight stream."""

    def __init__(
        self,
        arch: ArchitectureConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        generate_batch_sequences: int,
        trust_remote_code: bool = False,
        sleeps: bool = False,
        stop: Stop | None = None,
    ) -> None:
        super().__init__(stop)
        self._arch, self._weights = arch, Movable() if sleeps else None
        # torch's attention supports neither sinks nor score caps. transformers would silently ignore a cap.
        attention = "eager" if arch.extensions.attends_by_products else "sdpa"
        grouped = not arch.experts or takes_grouped(dtype, arch.hidden_size, arch.ffn_hidden_size)
        experts = {} if grouped else {"experts_implementation": "eager"}  # transformers does not check the widths
        self._model: PreTrainedModel = AutoModelForCausalLM.from_config(
            arch.hf_config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code, **experts
        )
        self._model.to(device).eval().requires_grad_(False)
        # Every call passes all settings. The defaults of the folder (top_k, penalties) must not interfere.
        self._model.generation_config = type(self._model.generation_config)()
        self._device, self._batch_sequences = device, generate_batch_sequences
        self._complete = False
        self.capabilities = EngineCapabilities(routing=arch.experts > 0)

    def sleep(self) -> None:
        """See `Engine.sleep`. The next update loads all weights."""
        if self._weights is not None:
            self._complete = False
            self._weights.leave(self._model.parameters())

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> SyncReport:
        """See `Engine.update_weights`. Tied output weights are optional."""
        self._complete, started = False, time.monotonic()
        if self._weights is not None:
            self._weights.restore()
        problems: list[str] = []
        destinations = _destinations(self._model, self._arch)
        missing = set(destinations)
        for name, tensor in named_tensors:
            parameter = destinations.get(name)
            if parameter is None:
                problems.append(f"'{name}' is unknown")
            elif name not in missing:
                problems.append(f"'{name}' arrived twice")
            elif parameter.shape != tensor.shape:
                problems.append(f"'{name}' has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}")
            else:
                parameter.copy_(tensor)
                missing.discard(name)
        problems += [f"'{name}' did not arrive" for name in sorted(missing)]
        if problems:
            raise ValueError(
                f"weight update {version} is not a complete set: {first_of(problems, 5, '; ')}; "
                "send every parameter once"
            )
        self.version, self._complete = version, True
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return SyncReport.gather([{"transfer": time.monotonic() - started}])

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        """See `Engine.submit`."""
        if not self._complete:
            raise RuntimeError("the engine has no complete set of weights; call update_weights first")
        check_requests(requests, self._arch.vocab_size)
        return super().submit(requests, params)

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[tuple[int, Completion]]:
        """See `BatchEngine.generate`. Sequences of similar length share a batch."""
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].token_ids))
        PROGRESS.expect(SAMPLES, len(requests))
        for start in range(0, len(order), self._batch_sequences):
            batch = order[start : start + self._batch_sequences]
            try:
                answers = self._generate_batch([requests[i] for i in batch], params)
            except _StopRequested:
                return
            PROGRESS.add(SAMPLES, len(batch), tokens=sum(len(answer.token_ids) for answer in answers))
            yield from zip(batch, answers, strict=True)

    @torch.inference_mode()
    def _generate_batch(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Completion]:
        longest = max(len(r.token_ids) for r in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.int64)
        attention = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.token_ids) :] = torch.tensor(request.token_ids)
            attention[row, longest - len(request.token_ids) :] = 1
        texts = params.stop_texts
        sampler = _Sampler(requests, params, self._device, self.on_tokens, self._stop)
        with _noted_experts(self._model, self._arch, params.routing) as noted:
            self._model.generate(
                input_ids=ids.to(self._device),
                attention_mask=attention.to(self._device),
                logits_processor=LogitsProcessorList([sampler]),
                do_sample=False,
                stopping_criteria=None if texts is None else StoppingCriteriaList([_Stopper(texts, longest)]),
                max_new_tokens=max(request.most_tokens(params) for request in requests),
                eos_token_id=list(params.stop_token_ids) or None,
                pad_token_id=0,
            )
        tokens_BS = torch.stack(sampler.tokens, dim=1).cpu()
        logprobs_BS = torch.stack(sampler.logprobs, dim=1).cpu()
        completions = [
            self._cut(tokens[: (most := request.most_tokens(params))], logprobs[:most], params)
            for request, tokens, logprobs in zip(requests, tokens_BS.tolist(), logprobs_BS.tolist(), strict=True)
        ]
        if params.routing is not None:
            completions = _with_routing(requests, completions, noted, params.routing)
        return [stopped(completion, params) for completion in completions]

    def _cut(self, tokens: list[int], logprobs: list[float], params: SamplingParams) -> Completion:
        """Cut a response after its first stop token and drop the later tokens of the batch."""
        stop = next((i for i, token in enumerate(tokens) if token in params.stop_token_ids), None)
        length = len(tokens) if stop is None else stop + 1
        return Completion(tuple(tokens[:length]), tuple(logprobs[:length]), stop is None, self.version)

    def close(self) -> None:
        """Release the model."""
        self._complete = False
        self._model = None


def embedded_engine(
    *, config: Config, folder: Path, stop_token_ids: tuple[int, ...], runtime: Runtime, stop: Stop
) -> TransformersEngine:
    """See `EngineFactory`."""
    return TransformersEngine(
        load_architecture(folder, config.model),
        dtype=getattr(torch, config.rollout.dtype or config.model.dtype),
        device=runtime.device,
        generate_batch_sequences=config.rollout.generate_batch_sequences,
        trust_remote_code=config.model.trust_remote_code,
        sleeps=config.offloads,
        stop=stop,
    )
