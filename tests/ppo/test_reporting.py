"""Tests of the reports of a run during a stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.config import derive_run, load_config
from megappo.ppo.reporting import Reporter
from megappo.runtime.process import Runtime
from tests.support.places import ROOT


def test_progress_restarts_the_limit_of_a_stage(tmp_path: Path) -> None:
    """Each minibatch reports the stage to the watchdog again. Ranks without output do the same."""
    config = load_config(ROOT / "configs/quickstart.yaml", [f"run.directory={tmp_path}"])
    runtime, stages = Runtime(1, 2, 1, torch.device("cpu")), list[tuple[str, str]]()
    reporter = Reporter(config, derive_run(config, 2), runtime, lambda *stage: stages.append(stage))
    with reporter.stage("update_actor", "the slowest rank"):
        reporter.goes_on()
    assert stages == [("update_actor", "the slowest rank")] * 2
    reporter.close()


@pytest.mark.parametrize(
    ("blocked", "sentence"), [(False, "the profile of the step is in "), (True, "the step is not traced: ")]
)
@pytest.mark.usefixtures("world_of_one")
def test_traced_step_reports_its_page_or_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], blocked: bool, sentence: str
) -> None:
    if blocked:
        (tmp_path / "profile").touch()  # the path of the folder of traces
    overrides = [f"run.directory={tmp_path}", "logging.profile_steps=[1]", "logging.tensorboard=false"]
    config = load_config(ROOT / "configs/quickstart.yaml", overrides)
    reporter = Reporter(config, derive_run(config, 2), Runtime(0, 1, 0, torch.device("cpu")))
    experience: Any = None  # no logger shows distributions
    reporter.begin_step(1)
    with reporter.stage("rollout"):
        pass
    reporter.end_step({"step_tokens": 1.0, "step_samples": 1.0}, experience)
    reporter.close()
    output = "".join(capsys.readouterr())
    assert sentence in output and str(tmp_path / "profile") in output
