"""Threads of torch wait passively, unless the user decides otherwise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.worlds import environment

ROOT = Path(__file__).parents[2]


def openmp_settings(command: list[str], **variables: str) -> dict[str, str]:
    """Return the settings that the OpenMP library of torch prints when a process loads the library. `GOMP_SPINCOUNT`
    is the number of checks before a waiting thread releases its core."""
    inherited = {k: v for k, v in environment().items() if not k.startswith(("OMP_", "KMP_", "GOMP_"))}
    variables_of_process = inherited | {"OMP_DISPLAY_ENV": "verbose"} | variables
    done = subprocess.run(command, env=variables_of_process, capture_output=True, text=True, timeout=120, check=True)
    return dict(re.findall(r"(G?OMP_\w+)\s*=\s*'([^']*)'", done.stderr))


pytestmark = pytest.mark.waits


@pytest.mark.parametrize("code", ["import megappo, torch", "import megappo.api; megappo.api.load_config; import torch"])
def test_threads_wait_passively(code: str) -> None:
    """The number of threads does not change."""
    settings = openmp_settings([sys.executable, "-c", code], OMP_NUM_THREADS="3")
    assert (settings["GOMP_SPINCOUNT"], settings["OMP_NUM_THREADS"]) == ("0", "3")


def test_policy_of_the_user_is_not_changed() -> None:
    settings = openmp_settings([sys.executable, "-c", "import megappo, torch"], OMP_WAIT_POLICY="active")
    assert int(settings["GOMP_SPINCOUNT"]) > 10**6


def test_launch_python_sets_the_policy_for_scripts() -> None:
    """This includes scripts that import torch before megappo."""
    own = {"MEGAPPO_PYTHON": sys.executable, "PATH": os.environ["PATH"]}
    settings = openmp_settings([str(ROOT / "launch" / "python"), "-c", "import torch"], **own)
    assert settings["GOMP_SPINCOUNT"] == "0"
