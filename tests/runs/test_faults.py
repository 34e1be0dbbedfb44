"""A fault on one rank either ends all ranks within seconds with its cause, or the run continues. A restart loses no
results."""

from __future__ import annotations

import pytest

from tests.support.harness import succeed

pytestmark = [pytest.mark.slow, pytest.mark.waits]


@pytest.mark.parametrize(
    ("run", "kinds"),
    [("split", "raise,nap,hang@ppo/assembly/start.py:choose_start after"),
     pytest.param("episodes", "full,hang@CheckpointWriter._write after", marks=pytest.mark.exhaustive),
     ("ahead", "full once,kill"), pytest.param("resumed", "kill", marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_a_sample_of_fault_points(run: str, kinds: str) -> None:
    """Inject a sample of the faults of `python -m tests.house.faults`. The sample changes with the code."""
    succeed("tests.house.faults", "--runs", run, "--kinds", kinds, "--each", 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", ["split", "ahead", "flying"])
def test_seventeen_faults_do_not_change_a_run(run: str) -> None:
    """The run is ended by seventeen faults at different points. `test_resume.py` tests kills at every stage."""
    succeed("tests.house.faults", "--runs", run, "--again", 17, timeout_seconds=900)
