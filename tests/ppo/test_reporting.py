"""What a run says of itself while a stage goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.config import derive_run, load_config
from megappo.ppo.reporting import Reporter
from megappo.runtime.process import Runtime
from tests.support.places import ROOT


def test_what_a_stage_has_done_counts_for_its_limit(tmp_path: Path) -> None:
    """Each minibatch of an update tells the watchdog the stage anew, on ranks that write nothing, too."""
    config = load_config(ROOT / "configs/quickstart.yaml", [f"run.directory={tmp_path}"])
    runtime, told = Runtime(1, 2, 1, torch.device("cpu")), list[tuple[str, str]]()
    reporter = Reporter(config, derive_run(config, 2), runtime, lambda *stage: told.append(stage))
    with reporter.stage("update_actor", "the slowest rank"):
        reporter.goes_on()
    assert told == [("update_actor", "the slowest rank")] * 2
    reporter.close()


@pytest.mark.parametrize(
    ("blocked", "sentence"), [(False, "the profile of the step is in "), (True, "the step is not traced: ")]
)
@pytest.mark.usefixtures("world_of_one")
def test_a_traced_step_names_its_page_or_what_went_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], blocked: bool, sentence: str
) -> None:
    if blocked:
        (tmp_path / "profile").touch()  # where the folder of traces belongs
    words = [f"run.directory={tmp_path}", "logging.profile_steps=[1]", "logging.tensorboard=false"]
    config = load_config(ROOT / "configs/quickstart.yaml", words)
    reporter = Reporter(config, derive_run(config, 2), Runtime(0, 1, 0, torch.device("cpu")))
    experience: Any = None  # of which no logger shows distributions
    reporter.begin_step(1)
    with reporter.stage("rollout"):
        pass
    reporter.end_step({"step_tokens": 1.0, "step_samples": 1.0}, experience)
    reporter.close()
    said = "".join(capsys.readouterr())
    assert sentence in said and str(tmp_path / "profile") in said
