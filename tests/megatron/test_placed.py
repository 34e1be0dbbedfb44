"""A step's samples travel once to each role, stand where its minibatches need them, and are gone after the step."""

from pathlib import Path

import pytest

from tests.support.harness import launch

pytestmark = [pytest.mark.slow, pytest.mark.waits, pytest.mark.versions]


def test_samples_travel_once_per_role_and_step(tmp_path: Path) -> None:
    launch("placed_worker.py", 4, tmp_path / "run")
