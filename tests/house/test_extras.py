"""Every extra installs in a fresh environment, by the ranges of the packaging metadata and an index of today."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.house.test_packaging import clean
from tests.support.places import ROOT

pytestmark = [pytest.mark.waits, pytest.mark.exhaustive, pytest.mark.timeout(3600)]

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
BUILT_ON_GPUS = {"te"}
"""Of these what has a wheel is asked for: the rest is compiled with CUDA's compiler."""
PROGRAM = (
    "import importlib.metadata as metadata, megappo.api, megappo.cli\n"
    "from packaging.requirements import Requirement\n"
    "for line in {wanted!r}:\n"
    "    wanted = Requirement(line)\n"
    "    if wanted.marker is None or wanted.marker.evaluate():\n"
    "        assert wanted.specifier.contains(metadata.version(wanted.name), prereleases=True), line\n"
)


def pip(python: Path | str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module", autouse=True)
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One that has something, or the tests are skipped."""
    to = str(tmp_path_factory.mktemp("index"))
    found = pip(sys.executable, "download", "--no-deps", "--no-cache-dir", "-d", to, "packaging")
    if found.returncode:
        pytest.skip(f"no package index can be reached: {found.stderr.splitlines()[-1]}")


@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - BUILT_ON_GPUS))
def test_an_extra_installs(extra: str, tmp_path: Path) -> None:
    """What is installed fits together, is what the extra asks for, and lets megappo be imported."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "fresh")], check=True)
    python = tmp_path / "fresh" / "bin" / "python"
    done = pip(python, "install", "--no-cache-dir", f"{ROOT}[{extra}]")
    clean()
    assert done.returncode == 0, done.stderr
    fits = pip(python, "check")
    assert fits.returncode == 0, fits.stdout
    program = PROGRAM.format(wanted=EXTRAS[extra])
    ran = subprocess.run(
        [str(python), "-c", program], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    done = pip(python, "uninstall", "--yes", "torch")  # and with it most of the room it takes
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("extra", sorted(BUILT_ON_GPUS))
def test_what_is_compiled_on_gpus_can_be_had(extra: str, tmp_path: Path) -> None:
    """In the versions that the extra asks for."""
    wheels = [line.replace("pytorch,", "").replace(",pytorch", "").replace("[pytorch]", "") for line in EXTRAS[extra]]
    words = ["install", "--dry-run", "--ignore-installed", "--no-cache-dir", "--target", str(tmp_path), *wheels]
    done = pip(sys.executable, *words)
    assert done.returncode == 0, done.stderr
