"""What a run says of itself while a stage goes on."""

from __future__ import annotations

from pathlib import Path

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
