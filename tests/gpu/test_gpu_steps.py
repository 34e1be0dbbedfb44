"""Every step of the acceptance command on a real GPU. Skipped without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.acceptance.registry import STEPS, Place, Step
from tests.gpu.acceptance.runner import environment, run_steps
from tests.gpu.acceptance.table import Report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all steps share, so models are written only once."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_step(step: Step, scratch: Path, tmp_path: Path) -> None:
    report = Report(tmp_path / step.name, {"device": torch.cuda.get_device_name()})
    place = Place("cuda", False, str(scratch))
    run_steps([step], place, report, seconds=step.most_seconds, variables=environment(), log=tmp_path / "log")
    failed = [f"{row.what}: {row.result}" for row in report.rows if row.verdict == "failed"]
    assert report.rows and not failed, "\n".join(failed) + (tmp_path / "log").read_text()[-3000:]
