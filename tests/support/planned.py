"""Plans of the configurations of Qwen3 models."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from megappo.config import Config, load_config
from megappo.plan.hardware.machine_file import find_machine
from megappo.plan.inputs import Models
from megappo.plan.planner import Plan, make_plan, read_models
from tests.support.places import ROOT

MODELS = ROOT / "configs" / "models"
SMALL, MIDDLE, LARGE = (
    ROOT / f"{name}.yaml"
    for name in ("configs/qwen3_0.6b_1gpu_gsm8k", "tests/support/qwen3_8b_8gpu", "tests/support/qwen3_32b_2node")
)
SHIPPED, SHIPPED_LARGE = (ROOT / f"configs/{name}.yaml" for name in ("qwen3_8b_8gpu_math", "qwen3_32b_2node_math"))
"""Paths for the command. The configurations of their models are in the same folder."""
ON = {SMALL: ("h100", 1), MIDDLE: ("h100", 8), LARGE: ("h200", 16), SHIPPED: ("h100", 8)}
EMBEDDED = {
    path: ["rollout.engine=transformers", f"rollout.generate_batch_sequences={batch}"]
    for path, batch in {SMALL: 128, MIDDLE: 16, LARGE: 8, SHIPPED: 16, SHIPPED_LARGE: 8}.items()
}
"""Here plans use the engine inside the trainer. test_servers.py covers servers of SGLang."""
# Weights of the published safetensors files.
PUBLISHED = {"Qwen3-0.6B": 596_049_920, "Qwen3-8B": 8_190_735_360, "Qwen3-32B": 32_762_123_264}


@cache
def models_of(path: Path) -> Models:
    return read_models(load_config(path), MODELS).models


def load(path: Path, *overrides: str) -> Config:
    engine = [] if any(override.startswith("rollout.servers") for override in overrides) else EMBEDDED[path]
    return load_config(path, [*engine, *overrides])


def plan(path: Path, *overrides: str, machine: str | None = None, gpus: int | None = None) -> Plan:
    name, count = ON[path]
    return make_plan(load(path, *overrides), models_of(path), find_machine(machine or name), gpus or count)
