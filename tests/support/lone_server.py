"""One real SGLang server with the weights of a folder, without a trainer, and the expected values from transformers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megappo.config import load_config
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.engines.sglang.client import Endpoint
from megappo.engines.sglang.requests.dispatch import Dispatcher
from megappo.engines.sglang.requests.generation import RequestLimits
from megappo.engines.sglang.servers.server import start_server
from megappo.engines.sglang.servers.spec import ServerSpec
from tests.support.places import ROOT
from tests.support.stand_in import Outcome, outcome_of, submit

TOKENIZER = ROOT / "configs/models/tiny_arithmetic"


@contextmanager
def lone_server(folder: Path, *overrides: str, stop_token_ids: tuple[int, ...], **arguments: Any) -> Iterator[Endpoint]:
    """Start a server of the model in `folder / "model"`. `arguments` are additional arguments of SGLang, which no
    rule checks."""
    settings = (
        f"model.path={folder / 'model'}", f"model.tokenizer={TOKENIZER}", "model.init=pretrained",
        f"run.directory={folder / 'run'}", *overrides,
    )  # fmt: skip
    config = load_config(ROOT / "configs/sglang_quickstart.yaml", settings)
    spec = ServerSpec.of(config, folder / "model", stop_token_ids, on_cuda=False)
    chosen = {name.replace("_", "-"): value for name, value in arguments.items()}
    arguments_of_server = {"load-format": "auto", "weight-version": "1", **spec.settings.arguments, **chosen}
    object.__setattr__(spec, "settings", spec.settings.model_copy(update={"arguments": arguments_of_server}))
    server = start_server(spec, 0, 0, 1)
    try:
        server.wait_ready()
        yield server.endpoint
    finally:
        server.stop()


def request_text(
    endpoint: Endpoint, requests: Sequence[GenerateRequest], params: SamplingParams, version: int = 1
) -> Outcome:
    """Return the answers of the server to requests."""
    dispatcher = Dispatcher(RequestLimits(512, 60.0, 60.0, 60.0), lambda: None)
    try:
        dispatcher.use([endpoint], version)
        return outcome_of(dispatcher, submit(dispatcher, dict(enumerate(requests)), params), [endpoint])
    finally:
        dispatcher.close()


def reference(folder: Path) -> PreTrainedModel:
    """Load the model of a folder with transformers in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def token_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], *, temperature: float = 1.0,
    masked: Collection[int] = (), least_tokens: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Return the log-probability of each response token, (R,). The first `least_tokens` positions exclude the
    `masked` tokens."""
    logits_TV = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float() / temperature
    logits_TV[:least_tokens, sorted(masked)] = -torch.inf
    return logits_TV.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]


def largest_gap(
    model: PreTrainedModel, requests: Sequence[GenerateRequest], answers: Sequence[Completion], **options: Any
) -> float:
    """Return the largest difference in nats between log-probabilities of the engine and of transformers."""
    gaps = [
        (token_logprobs(model, r.token_ids, a.token_ids, **options) - torch.tensor(a.logprobs)).abs().max()
        for r, a in zip(requests, answers, strict=True)
    ]
    return float(torch.stack(gaps).max())  # NaN if any difference is NaN
