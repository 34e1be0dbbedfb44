"""Probes after a sync, with the gap of their answers, and tensors on the device during each stage."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megappo.config import load_config
from megappo.config.sections.engine import EngineCapabilities
from megappo.engines.base import BatchEngine, SyncError
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams, SyncReport
from megappo.ppo.rollout import probe
from megappo.types import Prompt, Samples
from tests.support.harness import succeed
from tests.support.places import ROOT

LOGPROB = -1.0
"""Log-probability of every token by the actor."""
TOLERANCE_NATS = 0.75

pytestmark = pytest.mark.usefixtures("world_of_one")


class TwoServers(BatchEngine):
    """Two servers that answer with the log-probability `LOGPROB` of each token."""

    capabilities = EngineCapabilities(separate_processes=True)
    replicas = (0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.version, self.probed_prompts = 1, list[tuple[int, ...]]()

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[tuple[int, Completion]]:
        assert [request.replica for request in requests] == [0, 1] and params.greedy
        self.probed_prompts += {request.token_ids for request in requests}
        return enumerate([Completion((5, 6), (LOGPROB, LOGPROB), True, 1)] * 2)

    def update_weights(self, named_tensors: Any, version: int) -> SyncReport:
        raise AssertionError("weights stay")


def probed(
    monkeypatch: pytest.MonkeyPatch,
    engine: TwoServers,
    longest: int,
    prompt_tokens: int,
    nats: Mapping[int, float] = MappingProxyType({}),
) -> float:
    """Return the gap of a run. Each training prompt has `prompt_tokens` consecutive token ids, counted from 0. The
    last token of server 1 has a gap of `nats`, by the length of the prompt."""

    def forward(samples: Samples) -> Tensor:
        outputs_BR = torch.full((len(samples.sequences), 2), LOGPROB)
        outputs_BR[samples.sample_ids_B == 1, 1] += nats.get(len(samples.sequences[0]) - 2, 0.0)
        return outputs_BR

    monkeypatch.setattr(probe, "announce", lambda samples, _device: samples)
    monkeypatch.setattr(probe, "place", lambda _actor, samples: SimpleNamespace(forward=lambda: forward(samples)))
    servers = f"rollout.servers={{probe_tolerance_nats: {TOLERANCE_NATS}}}"
    overrides = [f"data.max_prompt_tokens={longest}", servers]
    prompts = [Prompt(i, tuple(range(i * prompt_tokens, (i + 1) * prompt_tokens)), "", None, {}) for i in range(4096)]
    parts: Any = SimpleNamespace(
        engine=engine,
        config=load_config(ROOT / "configs/quickstart.yaml", overrides),
        train_prompts=prompts,
        sampling=lambda tokens, temperature, **_: SamplingParams(1.0, tokens, (), greedy=temperature == 0.0),
        vocabulary=None,
        answerer="the engine",
        runtime=SimpleNamespace(device=torch.device("cpu")),
        actor=SimpleNamespace(rest=lambda: None),
    )
    return probe.probe_engines(parts)["sync/probe_gap"]


@pytest.mark.parametrize(("longest", "lengths"), [(5, [5]), (8, [8]), (300, [8, 300]), (5000, [8, 1024])])
def test_probe_sends_a_short_and_a_long_prompt(
    monkeypatch: pytest.MonkeyPatch, longest: int, lengths: list[int]
) -> None:
    """The prompts are concatenated training prompts, up to the maximum length."""
    engine = TwoServers()
    assert probed(monkeypatch, engine, longest, prompt_tokens=3) == 0
    assert engine.probed_prompts == [tuple(range(length)) for length in lengths]


@pytest.mark.parametrize(("nats", "gap"), [({8: 0.25}, 0.25), ({1024: 0.5}, 0.5), ({8: 0.25, 1024: 0.125}, 0.25)])
def test_probe_reports_largest_gap_of_servers_and_prompts(
    monkeypatch: pytest.MonkeyPatch, nats: dict[int, float], gap: float
) -> None:
    assert probed(monkeypatch, TwoServers(), 5000, prompt_tokens=3, nats=nats) == pytest.approx(gap)


@pytest.mark.parametrize("nats", [{8: 0.875}, {1024: 0.875}, {8: math.nan}, {1024: math.nan}])
def test_gap_above_the_tolerance_ends_the_run(monkeypatch: pytest.MonkeyPatch, nats: dict[int, float]) -> None:
    (gap,) = nats.values()
    message = rf"weight sync 1 server 1 has log-probabilities {gap:.3g} nats from those of the trainer, above .* 0\.75;"
    with pytest.raises(SyncError, match=message):
        probed(monkeypatch, TwoServers(), 5000, prompt_tokens=3, nats=nats)


CRITIC = ["critic's weights"]
"""The weights stay on the device between the forward pass and the updates of the critic."""


@pytest.mark.waits
def test_device_has_only_tensors_of_current_stage(tmp_path: Path) -> None:
    """The tensors are recorded at the start of each stage. A probe by the actor precedes the rollout."""
    stages = json.loads(succeed("tests.support.workers.storage_worker", tmp_path))
    step = [
        ["rollout", []], ["reward", []], ["forward", []], ["advantages", CRITIC], ["update_critic", CRITIC],
        ["update_actor", []], ["sync", []],
    ]  # fmt: skip
    assert stages == [["sync", []], *step, *step, ["end", []]]
