"""Real SGLang servers sample from the distribution of the model, whatever a server's own defaults are."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from megappo.engines.protocol import GenerateRequest, SamplingParams

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs the full environment", allow_module_level=True)

from tests.support.lone_server import ask, largest_gap, lone_server, reference, token_logprobs
from tests.support.models import VOCAB, write_model

pytestmark = [pytest.mark.slow, pytest.mark.waits]
STOP = 1
PROMPT = (5, 6, 7)
PREFERRED = {
    "top_k": 2, "top_p": 0.5, "min_p": 0.3, "frequency_penalty": 1.0, "presence_penalty": 1.0,
    "repetition_penalty": 1.5, "temperature": 0.3, "logit_bias": {"9": 30.0}, "stop_token_ids": [3, 4, 8],
    "ignore_eos": True, "max_new_tokens": 2, "n": 2, "sampling_seed": 3,
}  # fmt: skip


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's statistic over the 15 most likely tokens and all others together: 15 degrees of freedom."""
    top = probabilities.topk(15).indices
    expected = torch.cat([probabilities[top], 1 - probabilities[top].sum(0, keepdim=True)]) * counts.sum()
    found = torch.cat([counts[top], (counts.sum() - counts[top].sum())[None]])
    return float(((found - expected) ** 2 / expected).sum())


def test_a_servers_own_sampling_parameters_change_no_sample(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen3", 3, initializer_range=0.3)
    model, params = reference(tmp_path), SamplingParams(1.0, 3, (STOP,))
    requests = [GenerateRequest(PROMPT, seed=i, prompt_id=0) for i in range(2000)]
    preferred = {"weight_version": "1", "preferred_sampling_params": json.dumps(PREFERRED)}
    with lone_server(tmp_path, stop_token_ids=(STOP,), **preferred) as server:
        outcome = ask(server, requests, params)
    assert outcome.refusal is None and len(outcome.completions) == len(requests)
    answers = [outcome.completions[i] for i in range(len(requests))]
    assert {len(a.token_ids) for a in answers if a.token_ids[-1] != STOP} == {3}
    first = torch.bincount(torch.tensor([a.token_ids[0] for a in answers]), minlength=VOCAB).float()
    probabilities = torch.stack([token_logprobs(model, PROMPT, (token,))[0] for token in range(VOCAB)]).exp()
    assert chi_square(first, probabilities) < 45  # of 15 degrees of freedom: 1 in 10,000; seeds are fixed
    assert largest_gap(model, requests[:200], answers[:200]) < 1e-5
