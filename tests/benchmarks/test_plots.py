"""Each kind of result has a picture with a small file, and results without a picture are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.found import DOCUMENTS
from tests.support.harness import start

pytestmark = pytest.mark.waits

MOST_BYTES = 60_000


def test_each_benchmark_has_a_small_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    files = []
    for name, document in DOCUMENTS.items():
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"benchmark": name, **document}))
    place = tmp_path / "pictures"
    done = start("benchmarks.plots", *files, "--out", place, "--name", "today")
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {f"today-{kind}.png" for kind in ({*DOCUMENTS, "trl-speed", "trl-curves"} - {"trl"})}
    assert {path.name for path in place.iterdir()} == expected == {Path(line).name for line in done.stdout.split()}
    assert all(1000 < path.stat().st_size < MOST_BYTES for path in place.iterdir())


def test_results_without_a_picture_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    file.write_text(json.dumps({"rows": []}))
    done = start("benchmarks.plots", file)
    assert done.returncode == 2
    assert done.stderr == f"plots.py: error: {file} is not of a benchmark with a picture; omit it\n"
