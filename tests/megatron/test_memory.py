"""Memory of a process with a model of 71M parameters.

With offloading the process needs little more memory than the largest stage. An optimizer of adapters is very small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from tests.plan.test_measured import base_config
from tests.support.harness import run_worker

pytestmark = [pytest.mark.slow, pytest.mark.waits]

PARAMETERS = 70_793_280
"""Number of parameters of SmolLM2-135M with 12 of its 30 layers."""
MOST = 1.15
LEAST = 0.05
"""Largest fraction of the optimizer memory for adapters of rank 16."""
OFFLOAD = [f"{role}.offload=true" for role in ("actor", "critic", "reference")]


def write_config(root: Path) -> Path:
    """Write a configuration of a step with two samples and a float32 model with the widths of SmolLM2-135M. An
    update needs 16 bytes per parameter."""
    model = AutoConfig.for_model(
        "llama", hidden_size=576, num_hidden_layers=12, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536, vocab_size=49152, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model.save_pretrained(root / "model")
    content = base_config(root / "model")
    content["run"] |= {"steps": 1, "export_final_model": False, "directory": str(root / "run")}
    content["model"]["dtype"] = "float32"
    for role in ("actor", "critic"):
        content[role] = {**content[role], "minibatch_sequences": 2, "microbatch_budget_tokens": 64}
    content["reference"] = {}
    content["algorithm"] = {"kl_in_loss": {"kind": "low_var_kl", "coef": 0.1}}
    content["rollout"] |= {"prompts_per_step": 2, "max_response_tokens": 4}
    (root / "run.yaml").write_text(yaml.safe_dump(content))
    return root / "run.yaml"


def measured(config: Path, *, alone: bool, overrides: list[str]) -> dict[str, Any]:
    case = {"config": str(config), "overrides": overrides, "alone": alone}
    result: dict[str, Any] = run_worker("memory_worker.py", 1, case, timeout_seconds=900)
    return result


def test_memory_equals_the_largest_stage(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    alone = measured(config, alone=True, overrides=[])
    moved = measured(config, alone=False, overrides=OFFLOAD)
    adapters = measured(config, alone=True, overrides=["actor.lora={rank: 16, alpha: 32}"])
    of_update = 16 * PARAMETERS
    assert alone["storages"]["update_actor"] == of_update
    assert of_update <= max(moved["storages"].values()) <= MOST * of_update, moved["storages"]
    assert alone["optimizers"] == 8 * PARAMETERS
    assert 0 < adapters["optimizers"] < LEAST * alone["optimizers"], adapters
    largest, peak = (max(m["anonymous"].values()) for m in (alone, moved))
    assert of_update < peak <= MOST * largest, (alone, moved)
