"""The hook for commit messages accepts subjects with a room and an imperative."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.house.commit_subject import subject_problem
from tests.support.places import ROOT


@pytest.mark.parametrize(
    "subject",
    [
        "engines: reuse one client per server",
        "configs: fix typo",
        "tests: " + 65 * "x",
        "Merge branch 'main' into feature",
        'Revert "engines: reuse one client per server"',
        "kernels: compile for sm_90\n\nThe body has any length and may end with a period.",
    ],
)
def test_valid_subjects(subject: str) -> None:
    assert subject_problem(subject) is None


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("tests: " + 66 * "x", "has 73 characters, must have at most 72"),
        ("reuse one client", "must be 'room: imperative verb ...'"),
        ("Engines: reuse one client", "must be 'room: imperative verb ...'"),
        ("engines: Reuse one client", "must be 'room: imperative verb ...'"),
        ("engines: reuse one client.", "without a final period"),
        ("engines:reuse", "must be 'room: imperative verb ...'"),
        ("", "must be 'room: imperative verb ...'"),
    ],
)
def test_invalid_subjects(subject: str, problem: str) -> None:
    assert problem in (subject_problem(subject) or "")


@pytest.mark.waits
def test_hook_of_pre_commit(tmp_path: Path) -> None:
    (hooks,) = [repo["hooks"] for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]]
    (hook,) = [hook for hook in hooks if "commit-msg" in hook.get("stages", ())]
    program, *arguments = hook["entry"].split()
    assert program == "python"
    for message, code in (("engines: reuse one client\n", 0), ("no room\n", 1)):
        file = tmp_path / "message"
        file.write_text(message)
        done = subprocess.run([sys.executable, *arguments, str(file)], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == code, done.stderr
