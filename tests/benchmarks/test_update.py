"""The benchmark of updates runs, and all forms of the bare model have equal results."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks.bare_model import BareModel, forms
from benchmarks.update import Size
from tests.support.harness import start
from tests.support.places import TINY


@pytest.mark.parametrize("is_critic", [False, True])
@pytest.mark.parametrize(("size", "ways"), [(Size(3, 5, 1, 9), 6), (Size(3, 5, 4, 4), 4)])
def test_all_forms_have_equal_results(size: Size, ways: int, is_critic: bool) -> None:
    """Loss and gradient are equal, and samples do not attend to other samples."""
    drawn = size.draw(10)
    assert sorted(n for _, n in drawn) == torch.linspace(size.shortest, size.longest, 3).round().int().tolist()
    targets = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for _, n in drawn]
    bare = BareModel(TINY, torch.float32, is_critic=is_critic)
    results = []
    for _, attention, calls in forms(drawn, targets):
        bare.forget_gradients()
        loss = bare.run(calls, attention)
        results.append((loss, bare.model.model.layers[0].self_attn.k_proj.weight.grad.clone()))
    assert len(results) == ways
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        assert float((gradient - results[0][1]).norm() / results[0][1].norm()) < 1e-5


@pytest.mark.waits
@pytest.mark.slow
def test_update_benchmark_prints_and_saves_a_table(tmp_path: Path) -> None:
    saved = tmp_path / "update.json"
    command = ["benchmarks.update", "configs/quickstart.yaml"]
    command += ["model.dtype=bfloat16", "actor.layout.tensor_parallel=1", "critic.layout.pipeline_parallel=1"]
    command += ["--samples", "4", "--prompt", "5", "--responses", "1-8", "--threads", "1", "--repeat", "3"]
    done = start(*command, "--json", saved)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "4 samples of 5 + 1 to 8 tokens, 1 rank, 1 thread in all" in done.stdout and "ratio" in done.stdout
    rows = json.loads(saved.read_text())["rows"]
    assert [row["role"] for row in rows] == ["actor", "critic"]
    for row in rows:
        ratios = [ours / bare for ours, bare in zip(row["update_seconds"], row["bare_seconds"], strict=True)]
        assert row["ratios"] == ratios and row["median_ratio"] == statistics.median(ratios) and len(ratios) == 3
        assert row["form"] == min(row["other_forms"], key=row["other_forms"].__getitem__)
