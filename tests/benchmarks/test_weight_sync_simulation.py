"""The simulation of the weight sync reproduces the published tables."""

from __future__ import annotations

import pytest

from benchmarks.weight_sync_simulation import show, simulate
from megappo.config import load_config
from tests.support.places import ROOT

CONFIG = ROOT / "configs" / "qwen3_235b_a22b_16node_dapo_math.yaml"
RESULT = ROOT / "benchmarks" / "results" / "2026-11-22-weight-sync-bytes.md"
ELSEWHERE = f"rollout.sglang.urls=[{', '.join(f'http://a:{port}' for port in range(1, 65))}]"


@pytest.mark.parametrize("overrides", [(), ("rollout.sglang.placement=disaggregated", ELSEWHERE)])
def test_published_tables_are_current(overrides: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    (world,) = simulate(load_config(CONFIG, ["rollout.prompts_per_step=1024", *overrides]), CONFIG.parent, [128])
    show([world])
    *head, row = capsys.readouterr().out.splitlines()
    assert "\n".join(head) in RESULT.read_text() and row in RESULT.read_text().splitlines()
    assert sum(world.received_bytes) == sum(world.sent_bytes)


def test_replicated_model_needs_no_communication() -> None:
    config = load_config(ROOT / "configs" / "qwen3_0.6b_8gpu_gsm8k.yaml")
    (world,) = simulate(config, CONFIG.parent, [8])
    assert world.received_bytes == world.sent_bytes == [0] * 8
