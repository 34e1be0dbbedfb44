"""Real SGLang servers sample from the distribution of the model, independent of the defaults of the server."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.engines.protocol import GenerateRequest, SamplingParams

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs the full environment", allow_module_level=True)

from megappo.config import load_config
from megappo.engines.sglang.client import call
from megappo.engines.sglang.servers.server_hooks import SAMPLES_FOR_A_RUN
from megappo.engines.sglang.servers.spec import ServerSpec
from tests.support.lone_server import largest_gap, lone_server, reference, request_text, token_logprobs
from tests.support.models import VOCAB, write_model
from tests.support.places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.waits]
STOP = 1
PROMPT = (5, 6, 7)
PREFERRED = {
    "top_k": 2, "top_p": 0.5, "min_p": 0.3, "frequency_penalty": 1.0, "presence_penalty": 1.0,
    "repetition_penalty": 1.5, "temperature": 0.3, "logit_bias": {"9": 30.0}, "stop_token_ids": [3, 4, 8],
    "ignore_eos": True, "max_new_tokens": 2, "n": 2, "sampling_seed": 3,
}  # fmt: skip


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return Pearson's statistic of the 15 most likely tokens and one class of all other tokens: 15 degrees of
    freedom."""
    top = probabilities.topk(15).indices
    expected = torch.cat([probabilities[top], 1 - probabilities[top].sum(0, keepdim=True)]) * counts.sum()
    observed = torch.cat([counts[top], (counts.sum() - counts[top].sum())[None]])
    return float(((observed - expected) ** 2 / expected).sum())


def test_server_sampling_defaults_change_no_sample(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen3", 3, initializer_range=0.3)
    model, params = reference(tmp_path / "model"), SamplingParams(1.0, 3, (STOP,))
    requests = [GenerateRequest(PROMPT, seed=i, prompt_id=0) for i in range(2000)]
    preferred = {"preferred_sampling_params": json.dumps(PREFERRED)}
    with lone_server(tmp_path, stop_token_ids=(STOP,), **preferred) as server:
        outcome = request_text(server, requests, params)
    assert outcome.refusal is None and len(outcome.completions) == len(requests)
    answers = [outcome.completions[i] for i in range(len(requests))]
    assert {len(a.token_ids) for a in answers if a.token_ids[-1] != STOP} == {3}
    first = torch.bincount(torch.tensor([a.token_ids[0] for a in answers]), minlength=VOCAB).float()
    probabilities = torch.stack([token_logprobs(model, PROMPT, (token,))[0] for token in range(VOCAB)]).exp()
    assert chi_square(first, probabilities) < 45  # 15 degrees of freedom: probability of 1 in 10,000; seeds are fixed
    assert largest_gap(model, requests[:200], answers[:200]) < 1e-5


def test_stop_tokens_are_masked_only_before_the_minimum(tmp_path: Path) -> None:
    """SGLang retracts requests in every second pass, and half of the vocabulary ends a response."""
    write_model(tmp_path / "model", "qwen3", 3)
    stops, least = tuple(range(1, 66)), 6
    params = SamplingParams(0.8, 24, stops, min_new_tokens=least)
    requests = [GenerateRequest((70, 71 + i), seed=i, prompt_id=i) for i in range(48)]
    retracting = "rollout.servers.environment={SGLANG_TEST_RETRACT: 1, SGLANG_TEST_RETRACT_INTERVAL: 2}"
    settings = ("rollout.min_response_tokens=6", "rollout.max_response_tokens=24", retracting)
    with lone_server(tmp_path, *settings, stop_token_ids=stops) as server:
        outcome = request_text(server, requests, params)
    assert len(outcome.completions) == len(requests), outcome
    answers = [outcome.completions[i] for i in range(len(requests))]
    assert all(len(a.token_ids) > least for a in answers) and max(len(a.token_ids) for a in answers) > least + 2
    assert (
        largest_gap(reference(tmp_path / "model"), requests, answers, temperature=0.8, masked=stops, least_tokens=least)
        < 1e-5
    )


def test_servers_of_a_run_have_hooks_on_gpus(tmp_path: Path) -> None:
    """The processes of a server load the same plugins on GPUs. The server of a judge has no hooks."""
    config = load_config(ROOT / "configs/sglang_quickstart.yaml")
    spec = ServerSpec.of(config, ROOT / "configs/models/tiny_arithmetic", (1,), on_cuda=False)
    assert SAMPLES_FOR_A_RUN in spec.environment(tmp_path)
    assert SAMPLES_FOR_A_RUN not in replace(spec, called="judge").environment(tmp_path)
    environment = replace(spec, devices=(0,)).environment(tmp_path)
    program = (
        "from sglang.srt.plugins import load_plugins; load_plugins();"
        "from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer as P;"
        "from sglang.srt.utils.hf_transformers.tokenizer import attach_additional_stop_token_ids as attach;"
        "print(*(hasattr(function, '__wrapped__') for function in (P._prepare, attach)))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"], done.stderr


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        pytest.param("llama", {"rope_parameters": YARN}, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", {}, marks=pytest.mark.exhaustive),
        pytest.param("glm4_moe", {}, marks=pytest.mark.exhaustive),
    ],
    ids=["llama", "yarn", "qwen3_moe", "glm4_moe"],
)
def test_responses_reach_the_last_position(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """The inputs have different lengths. The pool has room for one input at a time."""
    write_model(tmp_path / "model", family, 3, max_position_embeddings=64, eos_token_id=None, **changes)
    inputs = (33, *range(54, 64))
    requests = [
        GenerateRequest(tuple(2 + (7 * i + j) % 100 for j in range(n)), seed=i, prompt_id=i, max_new_tokens=64 - n)
        for i, n in enumerate(inputs)
    ]
    settings = (
        "data.max_prompt_tokens=63", "rollout.max_response_tokens=31", "rollout.max_total_tokens=64",
        "rollout.servers={threads: 1, max_total_tokens: 94}",
    )  # fmt: skip
    params = SamplingParams(1.0, 31, ())
    with lone_server(tmp_path, *settings, stop_token_ids=(), max_total_tokens=72) as server:
        outcome = request_text(server, requests, params)
    assert outcome.refusal is None and len(outcome.completions) == len(requests), outcome
    answers = [outcome.completions[i] for i in range(len(requests))]
    assert [len(a.token_ids) for a in answers] == [64 - n for n in inputs] and all(a.truncated for a in answers)
    assert largest_gap(reference(tmp_path / "model"), requests, answers) < 1e-5


def test_new_weights_invalidate_caches(tmp_path: Path) -> None:
    """With `pause: in_place` a sync keeps the caches. The cache is used only within a version."""
    for name, seed in (("model", 3), ("newer", 4)):
        write_model(tmp_path / name, "qwen3", seed)
    params, prompt = SamplingParams(1.0, 8, ()), tuple(range(2, 50))
    requests = [GenerateRequest(prompt, seed=i, prompt_id=0) for i in range(4)]
    caching = "rollout.servers={threads: 1, max_total_tokens: 4096, deterministic: false}"
    with lone_server(tmp_path, "data.max_prompt_tokens=64", caching, stop_token_ids=()) as server:
        for version, name in ((1, "model"), (2, "newer"), (3, "model")):
            if version > 1:
                body: dict[str, Any] = {
                    "model_path": str(tmp_path / name),
                    "flush_cache": False,
                    "weight_version": str(version),
                }
                call(server, "/update_weights_from_disk", body, timeout_seconds=60)
            for use in ("first", "again"):
                outcome = request_text(server, requests, params, version)
                answers = [outcome.completions[i] for i in range(len(requests))]
                assert largest_gap(reference(tmp_path / name), requests, answers) < 1e-5, (version, use)
                assert outcome.cache[0].cached_tokens >= (0 if use == "first" else 4 * 40)
