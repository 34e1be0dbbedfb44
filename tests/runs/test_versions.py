"""A run goes on with other versions of Python, torch and Megatron-Core: from the light set to the full one and back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.attempts import SMALL, timeless
from tests.support.places import ROOT

OTHER = os.environ.get("MEGAPPO_OTHER_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.versions,
    pytest.mark.skipif(not OTHER, reason="one environment is here; tests/run.sh --light has two"),
]
EVALUATED = "evaluation.every_steps=1"
"""As the last step of a run is, whatever its number."""


def train(python: str, directory: Path, steps: int) -> str:
    """What a run of the quickstart on two ranks prints, up to a step."""
    settings = (f"run.steps={steps}", "checkpoint.every_steps=1", "actor.optimizer.schedule=constant", EVALUATED)
    command = ["launch/torchrun.sh", "2", "train", "configs/quickstart.yaml", f"run.directory={directory}"]
    done = subprocess.run(
        ["bash", *command, *SMALL, *settings], cwd=ROOT, env=os.environ | {"MEGAPPO_PYTHON": python},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "Warning" not in done.stdout and "DEPRECATED" not in done.stdout, done.stdout
    return done.stdout


def test_a_run_goes_on_where_other_versions_left_it(tmp_path: Path) -> None:
    """From one to the other and back: every number of three steps is near that of a run that kept its versions."""
    versions = ["-c", "import sys, importlib.metadata as m; print(sys.version_info[:2], m.version('megatron-core'))"]
    ours, theirs = (subprocess.check_output([python, *versions], text=True) for python in (sys.executable, OTHER))
    assert ours != theirs
    train(sys.executable, tmp_path / "kept", 3)
    for step, python in enumerate((sys.executable, OTHER, sys.executable), 1):
        said = train(python, tmp_path / "changed", step)
        assert step == 1 or f"continuing after step {step - 1} from" in said
    kept, changed = (timeless(tmp_path / name / "metrics.jsonl") for name in ("kept", "changed"))
    assert [line["step"] for line in kept] == [line["step"] for line in changed] == [0, 1, 2, 3]
    for one, other in zip(kept, changed, strict=True):
        wanted = {name: float(value) for name, value in one.items()}  # "nan" is a string there
        assert {name: float(value) for name, value in other.items()} == pytest.approx(
            wanted, rel=1e-4, abs=1e-6, nan_ok=True
        )
