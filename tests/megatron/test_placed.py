"""Samples of a step are sent once to each role, to the ranks of their minibatches, and are freed after the step."""

from pathlib import Path

import pytest

from tests.support.harness import launch

pytestmark = [pytest.mark.slow, pytest.mark.waits, pytest.mark.versions]


def test_samples_are_sent_once_per_role_and_step(tmp_path: Path) -> None:
    launch("placed_worker.py", 4, tmp_path / "run")
