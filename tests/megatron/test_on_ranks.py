"""Models on several ranks: attention of split packs, sums of gradients, sends, samples, host reads and memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from tests.plan.test_measured import base_config
from tests.support.harness import launch, run_worker
from tests.support.models import write_model
from tests.support.quick import cases

pytestmark = [pytest.mark.slow, pytest.mark.waits]


CHUNKS = (3, 1, 7, 2)
WINDOWS, GROUPS = (None, 1, 5, 100), (4, 2, 1)
ROUNDING = {"float32": 2e-6, "bfloat16": 2e-2}


@pytest.mark.versions
@pytest.mark.parametrize("ranks", cases([2, 3, 4], quick=(2,)))
def test_attention_equals_attention_of_the_whole_pack(ranks: int) -> None:
    """The cases have windows that are shorter and longer than a chunk and a segment, and grouped queries."""
    requests: dict[str, dict[str, Any]] = {
        f"{dtype}, window {window}, {groups} groups": {
            "lengths": [2 * ranks * chunk for chunk in CHUNKS], "window": window, "groups": groups, "dtype": dtype,
        }
        for dtype, window, groups in itertools.product(ROUNDING, WINDOWS, GROUPS)
    }  # fmt: skip
    for of_rank in run_worker("context_worker.py", ranks, requests):
        assert of_rank.keys() == requests.keys()
        for name, errors in of_rank.items():
            assert errors.keys() == {"output", "query", "key", "value"}
            if requests[name]["window"] == 1:  # a single key has a constant weight
                errors = {part: errors[part] for part in ("output", "value")}
            assert max(errors.values()) < ROUNDING[requests[name]["dtype"]], (name, errors)


ROUNDINGS = 12
"""Number of roundings in a sum over the microbatches of all ranks."""


@pytest.mark.versions
@pytest.mark.parametrize(("processes", "overlap"), [(1, False), (2, False), (2, True)])
def test_sums_of_gradients_are_float32(tmp_path: Path, processes: int, overlap: bool) -> None:
    """The gradient of each microbatch is bfloat16. The sum equals the float64 sum within float32 rounding. A sum in
    bfloat16 has a much larger error."""
    folder = write_model(tmp_path / "model", "qwen3", 3, num_hidden_layers=1, tie_word_embeddings=False)
    errors: dict[str, list[float]] = run_worker(
        "gradients_worker.py", processes, {"folder": str(folder), "overlap": overlap}
    )
    assert len(errors) == 11
    for name, (error, in_bfloat16) in errors.items():
        assert error <= ROUNDINGS * 2.0**-24, name
        assert in_bfloat16 > 1e-4, name


MICROBATCHES = 3
CASES: dict[str, dict[str, Any]] = {
    "one": {"tp": 1, "pp": 1, "recompute": "none"},
    "full": {"tp": 1, "pp": 1, "recompute": "full"},
    "sp2": {"tp": 2, "pp": 1, "recompute": "none"},
    "pp2": {"tp": 1, "pp": 2, "recompute": "none"},
    "cp2": {"tp": 1, "pp": 1, "cp": 2, "recompute": "none"},
}


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Return the host reads of each case with two and with four layers."""
    root = tmp_path_factory.mktemp("layers")
    folders = [str(write_model(root / str(n), "qwen3", 3, num_hidden_layers=n)) for n in (2, 4)]
    counts: dict[str, list[int]] = run_worker("reads_worker.py", 2, {"folders": folders, "cases": CASES})
    return counts


@pytest.mark.versions
@pytest.mark.parametrize("name", CASES)
def test_host_reads_do_not_grow_with_layers(reads: dict[str, list[int]], name: str) -> None:
    few, many = reads[name]
    assert few == many
    assert few <= 4 * MICROBATCHES


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


@pytest.mark.versions
def test_freed_outputs_arrive_unchanged() -> None:
    launch("sends_worker.py", 2, 64, 4096, 100000, timeout_seconds=60)


@pytest.mark.versions
def test_samples_are_sent_once_per_role_and_step(tmp_path: Path) -> None:
    launch("placed_worker.py", 4, tmp_path / "run")
