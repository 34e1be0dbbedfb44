"""Every kind of result has its picture, small enough for a repository, and what has none is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unit.helpers_configurations import ROOT

COMMAND = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "plots.py")]
MOST_BYTES = 60_000
STAGES = ("rollout", "forward", "update_critic", "update_actor", "sync")
TRL_ROWS = [
    {"profile": profile, "precision": precision, "ranks": ranks, "median_speed": 1.5, "trl_samples_per_second": 1.0,
     "megappo_samples_per_second": 1.5, "trl_peak_bytes": 8e9, "megappo_peak_bytes": 6e9}
    for profile, precision, ranks in (
        ("full:64", "mixed", 1), ("even:1-64", "mixed", 2), ("tail:32-256", "bfloat16", 1)
    )
]  # fmt: skip
CURVES = [{"seed": seed, "trl": [0.1, 0.2, 0.5], "megappo": [0.1, 0.3, 0.4]} for seed in (1, 2)]
SCALING = [
    {"kind": kind, "axis": "data", "processes": n, "seconds": [1.0, 1.2], "median_seconds": 1.1,
     "tokens_per_second": 100.0 * n}
    for kind in ("weak", "strong") for n in (1, 2, 4)
]  # fmt: skip
UPDATES = [{"role": role, "ratios": [1.0, 1.2, 1.1], "median_ratio": 1.1} for role in ("actor", "critic")]
GENERATION = {
    "sequences": 4, "response_tokens": 8, "generate_seconds": [1.0, 1.1], "engine_seconds": [0.9, 1.0]
}  # fmt: skip
DOCUMENTS: dict[str, dict[str, Any]] = {
    "trl": {"threads": 2, "rows": TRL_ROWS, "curves": CURVES},
    "scaling": {"cores": 2, "rows": SCALING},
    "update": {"size": {"shortest": 1, "longest": 64}, "ranks": 2, "rows": UPDATES},
    "rollout": {"generation": GENERATION, "answers": [{"tokens": 64, "per_second": 2000.0}]},
    "step": {"config": "a.yaml", "ranks": 2, "outside_share": 0.02,
             "stages": [{"stage": name, "median_seconds": 2.0} for name in (*STAGES, "step")]},
    "overhead": {"config": "a.yaml", "rows": [
        {"samples": n, "cpu_seconds_per_sample": 1e-3, "cpu_seconds": [1e-3 * n, 2e-3 * n]} for n in (64, 4096)]},
    "planned": {"rows": [{"words": words, "planned": dict.fromkeys(STAGES, 1.0), "measured": dict.fromkeys(STAGES, 1.1)}
                         for words in ("small", "middle", "large")]},
}  # fmt: skip


def test_each_question_has_a_small_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    files = []
    for name, document in DOCUMENTS.items():
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"benchmark": name, **document}))
    place = tmp_path / "pictures"
    done = subprocess.run(
        [*COMMAND, *map(str, files), "--out", str(place), "--name", "today"],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = {f"today-{kind}.png" for kind in ({*DOCUMENTS, "trl-speed", "trl-curves"} - {"trl"})}
    assert {path.name for path in place.iterdir()} == wanted == {Path(line).name for line in done.stdout.split()}
    assert all(1000 < path.stat().st_size < MOST_BYTES for path in place.iterdir())


def test_what_has_no_picture_is_told(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    file.write_text(json.dumps({"rows": []}))
    done = subprocess.run([*COMMAND, str(file)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert done.stderr == f"plots.py: error: {file} is of no benchmark that has a picture; leave it out\n"
