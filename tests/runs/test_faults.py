"""A fault of one rank ends all ranks in seconds with its cause, or the run goes on; started again, nothing is lost."""

from __future__ import annotations

import pytest

from tests.support.harness import start

pytestmark = [pytest.mark.slow, pytest.mark.waits]


@pytest.mark.parametrize(
    ("run", "kinds"),
    [
        ("split", "raise,nap,hang@ppo/start.py:choose_start after"),
        pytest.param("episodes", "full,hang@CheckpointWriter._write after", marks=pytest.mark.exhaustive),
        ("ahead", "full once,kill"),
        pytest.param("resumed", "kill", marks=pytest.mark.exhaustive),
    ],
)
def test_a_sample_of_points(run: str, kinds: str) -> None:
    """Of the matrix that `python -m tests.house.faults` tries; what is drawn changes with the code."""
    done = start("tests.house.faults", "--runs", run, "--kinds", kinds, "--each", 1)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", ["split", "ahead", "flying"])
def test_after_seventeen_faults_a_run_is_the_same(run: str) -> None:
    """One after the other, anywhere, each of which ends it; test_resume.py has kills at every stage."""
    done = start("tests.house.faults", "--runs", run, "--again", 17, timeout_seconds=900)
    assert done.returncode == 0, done.stdout + done.stderr
