"""What engines are asked after a sync, and which of their answers counts."""

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
"""Of every token, by the actor."""


class Off(Probed):
    """Two servers, of which the second one's log-probabilities are off by so many nats, by the length of a prompt."""

    def __init__(self, nats: dict[int, float]) -> None:
        super().__init__()
        self.nats, self.asked = nats, list[tuple[int, ...]]()

    def probe(self, request: GenerateRequest, params: SamplingParams) -> dict[int, Completion]:
        """Of both servers."""
        self.asked.append(request.token_ids)
        off = self.nats.get(len(request.token_ids), 0.0)
        said = [(LOGPROB, LOGPROB), (LOGPROB, LOGPROB - off)]
        return {index: Completion((5, 6), logprobs, True, 1) for index, logprobs in enumerate(said)}

    def judge(self, gaps: Mapping[int, float], tolerance_nats: float) -> float:
        """The largest, NaN if one is."""
        return float(torch.tensor(list(gaps.values())).max())


def probed(monkeypatch: pytest.MonkeyPatch, engine: Off, longest: int, prompt_tokens: int) -> float:
    """The gap of a run whose training prompts have so many tokens, counted on from 0."""

    def forward(samples: Samples) -> Tensor:
        return torch.full((len(samples.sequences), 2), LOGPROB)

    monkeypatch.setattr(probe, "check_answers", lambda *_: None)
    monkeypatch.setattr(probe, "announce", lambda samples, _device: samples)
    monkeypatch.setattr(probe, "place", lambda _actor, samples: SimpleNamespace(forward=lambda: forward(samples)))
    words = ["rollout.engine=sglang", f"data.max_prompt_tokens={longest}"]
    prompts = [Prompt(i, tuple(range(i * prompt_tokens, (i + 1) * prompt_tokens)), "", None, {}) for i in range(4096)]
    parts: Any = SimpleNamespace(
        engine=engine,
        config=load_config(ROOT / "configs/quickstart.yaml", words),
        train_prompts=prompts,
        sampling=lambda tokens, **_: SamplingParams(1.0, tokens, ()),
        vocabulary=None,
        answerer=None,
        runtime=SimpleNamespace(device=torch.device("cpu")),
        actor=SimpleNamespace(rest=lambda: None),
    )
    return probe.probe_engines(parts)["sync/probe_gap"]


@pytest.mark.parametrize(("longest", "lengths"), [(5, [5]), (8, [8]), (300, [8, 300]), (5000, [8, 1024])])
def test_a_short_and_a_long_prompt_are_asked(monkeypatch: pytest.MonkeyPatch, longest: int, lengths: list[int]) -> None:
    """Of training prompts one after another, no longer than a prompt may be."""
    engine = Off({})
    assert probed(monkeypatch, engine, longest, prompt_tokens=3) == 0
    assert engine.asked == [tuple(range(length)) for length in lengths]


@pytest.mark.parametrize(
    ("nats", "gap"), [({8: 0.25}, 0.25), ({1024: 0.5}, 0.5), ({8: 0.25, 1024: 0.125}, 0.25), ({8: math.nan}, math.nan)]
)
def test_the_largest_gap_of_any_server_and_prompt_counts(
    monkeypatch: pytest.MonkeyPatch, nats: dict[int, float], gap: float
) -> None:
    assert probed(monkeypatch, Off(nats), 5000, prompt_tokens=3) == pytest.approx(gap, nan_ok=True)
