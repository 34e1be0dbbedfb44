"""Layouts of shipped configurations: planned throughput, spare memory, and no much faster layout in the search."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megappo.config import load_config
from megappo.plan.planner import local_models_folder, planning
from megappo.plan.search import best_layouts
from tests.support.places import ROOT
from tests.support.quick import cases

PLANNED = re.compile(r"# Planned on (\d+) x (\w+): ([\d.]+) samples/s \(([\d.]+) with ")
_MATCHES = {path.stem: PLANNED.search(path.read_text()) for path in sorted((ROOT / "configs").glob("*.yaml"))}
HEADS = {name: match for name, match in _MATCHES.items() if match is not None}
SOME = ("qwen3_8b_8gpu_math", "qwen3_30b_a3b_4node_math")


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def path_of(name: str) -> Path:
    return ROOT / "configs" / f"{name}.yaml"


@pytest.mark.parametrize("name", HEADS)
def test_planned_throughput_is_current(name: str) -> None:
    """No rank uses more than 90% of the memory of its device in any stage."""
    gpus, machine, rate, before = HEADS[name].groups()
    config = load_config(path_of(name))
    planned = planning(config, machine, int(gpus), local_models_folder(path_of(name)))
    assert config.rollout.batch_sequences / planned.plan.step_seconds == pytest.approx(float(rate), rel=0.005)
    assert float(before) < float(rate)
    assert planned.plan.fits and planned.plan.fullest.peak < 0.9 * planned.machine.memory_bytes


@pytest.mark.parametrize("name", cases(HEADS, quick=SOME[:1], exhaustive=set(HEADS) - set(SOME)))
def test_search_finds_no_much_faster_layout(name: str) -> None:
    gpus, machine, _, _ = HEADS[name].groups()
    config = load_config(path_of(name))
    planned = planning(config, machine, int(gpus), local_models_folder(path_of(name)))
    fastest = best_layouts(config, planned.models, planned.machine, int(gpus), count=1)[0]
    assert 0.95 * planned.plan.step_seconds < fastest.step_seconds <= planned.plan.step_seconds * (1 + 1e-9)
