"""A run continues with other versions of Python, torch and Megatron-Core, from the light environment to the full one
and back."""

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
    pytest.mark.skipif(not OTHER, reason="only one environment is installed; tests/run.sh --light has two"),
]
EVALUATED = "evaluation.every_steps=1"
"""Evaluate each step, because the last step of a run is always evaluated."""


def train(python: str, directory: Path, steps: int) -> str:
    """Train the quickstart on two ranks up to a step and return the output."""
    settings = (f"run.steps={steps}", "checkpoint.every_steps=1", "actor.optimizer.schedule=constant", EVALUATED)
    command = ["launch/torchrun.sh", "2", "train", "configs/quickstart.yaml", f"run.directory={directory}"]
    done = subprocess.run(
        ["bash", *command, *SMALL, *settings], cwd=ROOT, env=os.environ | {"MEGAPPO_PYTHON": python},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "Warning" not in done.stdout and "DEPRECATED" not in done.stdout, done.stdout
    return done.stdout


def test_run_continues_with_other_versions(tmp_path: Path) -> None:
    """The versions change twice. All metrics of three steps are close to those of a run without changes."""
    versions = ["-c", "import sys, importlib.metadata as m; print(sys.version_info[:2], m.version('megatron-core'))"]
    ours, theirs = (subprocess.check_output([python, *versions], text=True) for python in (sys.executable, OTHER))
    assert ours != theirs
    train(sys.executable, tmp_path / "kept", 3)
    for step, python in enumerate((sys.executable, OTHER, sys.executable), 1):
        output = train(python, tmp_path / "changed", step)
        assert step == 1 or f"continuing after step {step - 1} from" in output
    reference, changed = (timeless(tmp_path / name / "metrics.jsonl") for name in ("kept", "changed"))
    assert [line["step"] for line in reference] == [line["step"] for line in changed] == [0, 1, 2, 3]
    for one, other in zip(reference, changed, strict=True):
        expected = {name: float(value) for name, value in one.items()}  # "nan" is a string there
        assert {name: float(value) for name, value in other.items()} == pytest.approx(
            expected, rel=1e-4, abs=1e-6, nan_ok=True
        )
