"""The configurations people start from: what stands in their heads holds."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.config import load_config
from megappo.plan.planner import fewest_ranks

ROOT = Path(__file__).parents[2]
CONFIGURATIONS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def head_command(path: Path, *programs: str) -> list[str]:
    """The words of the command in a file's head that starts with one of the programs."""
    for line in path.read_text().splitlines():
        words = shlex.split(line.removeprefix("#")) if line.startswith("#   ") else []
        if words and words[0] in programs:
            return words
    raise AssertionError(f"{path.name} shows no {' or '.join(programs)}")


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda p: p.stem)
def test_a_configuration_fits_the_machine_it_is_for(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.perf_counter()
    assert main(head_command(path, "megappo")[1:]) == 0
    assert time.perf_counter() - start < 10
    assert re.search(r"^fits: rank", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda p: p.stem)
def test_a_configuration_is_started_on_the_ranks_it_was_planned_for(path: Path) -> None:
    plan = head_command(path, "megappo")
    gpus = int(plan[plan.index("--gpus") + 1])
    start = head_command(path, "sbatch", "launch/torchrun.sh")
    if start[0] == "sbatch":
        ranks = int(start[start.index("--nodes") + 1]) * int(start[start.index("--gpus-per-node") + 1])
        assert start[start.index("--gpus-per-node") + 2] == "launch/slurm/ppo.sbatch"
    else:
        ranks = int(start[1])
        assert start[2] == "train"
    assert ranks == gpus
    assert gpus % fewest_ranks(load_config(path)) == 0
    assert f"configs/{path.name}" in plan
    assert f"configs/{path.name}" in start


def test_sizes_that_people_start_from_are_there() -> None:
    ranks = {int(head_command(p, "megappo")[-1]) for p in CONFIGURATIONS}
    assert ranks >= {1, 8, 16, 128}
    names = " ".join(path.stem for path in CONFIGURATIONS)
    assert all(word in names for word in ("0.6b", "8b", "32b", "gsm8k", "math", "dapo"))
