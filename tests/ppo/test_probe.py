"""Tests of the probe after a sync: the requests to the engines, and the gap of the answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megappo.config import load_config
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.ppo import probe
from megappo.types import Prompt, Samples
from tests.support.places import ROOT
from tests.support.workers.storage_worker import Probed

LOGPROB = -1.0
"""Log-probability of every token by the actor."""


class OffServers(Probed):
    """Two servers. The log-probabilities of the second server are off by `nats`, indexed by the length of the
    prompt."""

    def __init__(self, nats: dict[int, float]) -> None:
        super().__init__()
        self.nats, self.probed_prompts = nats, list[tuple[int, ...]]()

    def probe(self, request: GenerateRequest, params: SamplingParams) -> dict[int, Completion]:
        """Return the answers of both servers."""
        self.probed_prompts.append(request.token_ids)
        off = self.nats.get(len(request.token_ids), 0.0)
        logprobs_of_servers = [(LOGPROB, LOGPROB), (LOGPROB, LOGPROB - off)]
        return {index: Completion((5, 6), logprobs, True, 1) for index, logprobs in enumerate(logprobs_of_servers)}

    def judge(self, gaps: Mapping[int, float], tolerance_nats: float) -> float:
        """Return the largest gap, or NaN if any gap is NaN."""
        return float(torch.tensor(list(gaps.values())).max())


def probed(monkeypatch: pytest.MonkeyPatch, engine: OffServers, longest: int, prompt_tokens: int) -> float:
    """Return the gap of a run. Each training prompt has `prompt_tokens` consecutive token ids, counted from 0."""

    def forward(samples: Samples) -> Tensor:
        return torch.full((len(samples.sequences), 2), LOGPROB)

    monkeypatch.setattr(probe, "check_answers", lambda *_: None)
    monkeypatch.setattr(probe, "announce", lambda samples, _device: samples)
    monkeypatch.setattr(probe, "place", lambda _actor, samples: SimpleNamespace(forward=lambda: forward(samples)))
    overrides = ["rollout.engine=sglang", f"data.max_prompt_tokens={longest}"]
    prompts = [Prompt(i, tuple(range(i * prompt_tokens, (i + 1) * prompt_tokens)), "", None, {}) for i in range(4096)]
    parts: Any = SimpleNamespace(
        engine=engine,
        config=load_config(ROOT / "configs/quickstart.yaml", overrides),
        train_prompts=prompts,
        sampling=lambda tokens, **_: SamplingParams(1.0, tokens, ()),
        vocabulary=None,
        answerer=None,
        runtime=SimpleNamespace(device=torch.device("cpu")),
        actor=SimpleNamespace(rest=lambda: None),
    )
    return probe.probe_engines(parts)["sync/probe_gap"]


@pytest.mark.parametrize(("longest", "lengths"), [(5, [5]), (8, [8]), (300, [8, 300]), (5000, [8, 1024])])
def test_probe_sends_a_short_and_a_long_prompt(
    monkeypatch: pytest.MonkeyPatch, longest: int, lengths: list[int]
) -> None:
    """The prompts are concatenated training prompts, up to the maximum length."""
    engine = OffServers({})
    assert probed(monkeypatch, engine, longest, prompt_tokens=3) == 0
    assert engine.probed_prompts == [tuple(range(length)) for length in lengths]


@pytest.mark.parametrize(
    ("nats", "gap"), [({8: 0.25}, 0.25), ({1024: 0.5}, 0.5), ({8: 0.25, 1024: 0.125}, 0.25), ({8: math.nan}, math.nan)]
)
def test_probe_reports_largest_gap_of_servers_and_prompts(
    monkeypatch: pytest.MonkeyPatch, nats: dict[int, float], gap: float
) -> None:
    assert probed(monkeypatch, OffServers(nats), 5000, prompt_tokens=3) == pytest.approx(gap, nan_ok=True)
