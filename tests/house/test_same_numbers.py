"""Comparison of two runs: differences are reported, except for times and new metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.house.same_numbers import differences


def finished_run(directory: Path, weights: bytes, **metrics: float) -> Path:
    (directory / "final").mkdir(parents=True)
    (directory / "final" / "model.safetensors").write_bytes(weights)
    (directory / "metrics.jsonl").write_text(json.dumps({"step": 1, **metrics}) + "\n")
    return directory


def test_different_numbers_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = finished_run(tmp_path / "before", b"1", **{"actor/loss": 0.1, "time/step": 1.0, "kl/mean": float("nan")})
    same = finished_run(tmp_path / "same", b"1", **{"actor/loss": 0.1, "time/step": 2.0, "kl/mean": float("nan")})
    other = finished_run(tmp_path / "other", b"2", **{"actor/loss": 0.1, "new/metric": 1.0})
    assert differences(same, before) == []
    capsys.readouterr()
    assert differences(other, before) == ["the final weights in model.safetensors differ"]
    assert "kl/mean, new/metric" in capsys.readouterr().out
    bit = finished_run(tmp_path / "bit", b"1", **{"actor/loss": 0.1 + 2e-17})
    assert differences(bit, before) == [f"step 1: actor/loss was 0.1 and is {0.1 + 2e-17}"]
