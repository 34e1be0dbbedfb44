"""Layouts that ship: what their heads say, room for what a plan does not see, and nothing much faster to be found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megappo.config import load_config
from megappo.plan.planner import models_beside, planning
from megappo.plan.search import best_layouts
from tests.support.places import ROOT
from tests.support.quick import cases

PLANNED = re.compile(r"# Planned on (\d+) x (\w+): ([\d.]+) samples/s \(([\d.]+) with ")
_FOUND = {path.stem: PLANNED.search(path.read_text()) for path in sorted((ROOT / "configs").glob("*.yaml"))}
HEADS = {name: found for name, found in _FOUND.items() if found is not None}
SOME = ("qwen3_8b_8gpu_math", "qwen3_30b_a3b_4node_math")


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def path_of(name: str) -> Path:
    return ROOT / "configs" / f"{name}.yaml"


@pytest.mark.parametrize("name", HEADS)
def test_a_head_says_what_is_planned(name: str) -> None:
    """And that no rank fills more than nine tenths of its device in any stage."""
    gpus, machine, rate, before = HEADS[name].groups()
    config = load_config(path_of(name))
    found = planning(config, machine, int(gpus), models_beside(path_of(name)))
    assert config.rollout.batch_sequences / found.plan.step_seconds == pytest.approx(float(rate), rel=0.005)
    assert float(before) < float(rate)
    assert found.plan.fits and found.plan.fullest.peak < 0.9 * found.machine.memory_bytes


@pytest.mark.parametrize("name", cases(HEADS, quick=SOME[:1], exhaustive=set(HEADS) - set(SOME)))
def test_the_search_finds_nothing_much_faster(name: str) -> None:
    gpus, machine, _, _ = HEADS[name].groups()
    config = load_config(path_of(name))
    found = planning(config, machine, int(gpus), models_beside(path_of(name)))
    fastest = best_layouts(config, found.models, found.machine, int(gpus), count=1)[0]
    assert 0.95 * found.plan.step_seconds < fastest.step_seconds <= found.plan.step_seconds * (1 + 1e-9)
