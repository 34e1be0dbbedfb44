"""Command lines that a command prints can be run in the same shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megappo.config.start_lines import command_line, sbatch_line, training_line
from tests.support.places import ROOT


def path_with(folder: Path, *programs: str) -> str:
    """Return a PATH that contains only these programs."""
    for name in programs:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return str(folder)


def test_lines_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGAPPO_LAUNCH", raising=False)
    monkeypatch.setenv("PATH", path_with(tmp_path, "megappo", "torchrun"))
    assert command_line("plan", "a b.yaml") == "megappo plan 'a b.yaml'"
    assert training_line(1, 4, ["train", "a.yaml"]) == "torchrun --nproc-per-node 4 -m megappo train a.yaml"
    options = "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    assert training_line(2, 8, ["train", "a.yaml"]) == f"torchrun {options} -m megappo train a.yaml"


def test_lines_without_programs_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGAPPO_LAUNCH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_line("plan") == f"{sys.executable} -m megappo plan"
    expected = f"{sys.executable} -m torch.distributed.run --nproc-per-node 4 -m megappo train"
    assert training_line(1, 4, ["train"]) == expected


@pytest.mark.parametrize("folder", [ROOT, ROOT / "configs", Path("/tmp")])
def test_lines_of_a_clone_name_existing_scripts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MEGAPPO_LAUNCH", str(ROOT / "launch"))
    start = "" if folder == ROOT else f"{ROOT}/"
    assert command_line("plan", "a.yaml") == f"{start}launch/megappo plan a.yaml"
    assert training_line(1, 4, ["train", "a.yaml"]) == f"{start}launch/torchrun.sh 4 train a.yaml"
    line = training_line(2, 8, ["train", "a.yaml"])
    assert line == f"{start}launch/torchrun.sh --nodes 2 --head HOST:29500 8 train a.yaml"
    assert os.access(shlex.split(line)[0], os.X_OK)


@pytest.mark.parametrize("folder", [ROOT, ROOT / "configs"])
def test_job_line_has_the_repository_and_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    arguments = shlex.split(sbatch_line(2, 8, Path("a.yaml")))
    if folder == ROOT:
        assert arguments == ["sbatch", "--nodes", "2", "--gpus-per-node", "8", "launch/slurm/ppo.sbatch", "a.yaml"]
        return
    assert arguments[:2] == [f"MEGAPPO_ROOT={ROOT}", "sbatch"]
    assert arguments[-2:] == [str(ROOT / "launch/slurm/ppo.sbatch"), "a.yaml"]


@pytest.mark.waits
def test_the_scripts_of_a_clone_set_the_variable() -> None:
    script = f"unset MEGAPPO_LAUNCH; source {ROOT}/launch/environment.sh; echo $MEGAPPO_LAUNCH"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{ROOT}/launch\n"
