"""Installation of every extra in a new environment, with the current packages of an index."""

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
"""Extras that need the CUDA compiler. Only the availability of their packages is tested."""
PROGRAM = (
    "import importlib.metadata as metadata, megappo.api, megappo.cli\n"
    "from packaging.requirements import Requirement\n"
    "for line in {requirements!r}:\n"
    "    requirement = Requirement(line)\n"
    "    if requirement.marker is None or requirement.marker.evaluate():\n"
    "        assert requirement.specifier.contains(metadata.version(requirement.name), prereleases=True), line\n"
)


def pip(python: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module", autouse=True)
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip the tests if no package index is available."""
    to = str(tmp_path_factory.mktemp("index"))
    download = pip(sys.executable, "download", "--no-deps", "--no-cache-dir", "-d", to, "packaging")
    if download.returncode:
        pytest.skip(f"no package index can be reached: {download.stderr.splitlines()[-1]}")


@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - BUILT_ON_GPUS))
def test_extra_installs(extra: str, tmp_path: Path) -> None:
    """The installed packages are compatible and within the ranges of the extra, and megappo can be imported."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "fresh")], check=True)
    python = tmp_path / "fresh" / "bin" / "python"
    done = pip(python, "install", "--no-cache-dir", f"{ROOT}[{extra}]")
    clean()
    assert done.returncode == 0, done.stderr
    fits = pip(python, "check")
    assert fits.returncode == 0, fits.stdout
    program = PROGRAM.format(requirements=EXTRAS[extra])
    ran = subprocess.run(
        [str(python), "-c", program], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    done = pip(python, "uninstall", "--yes", "torch")  # this frees most of the disk space
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("extra", sorted(BUILT_ON_GPUS))
def test_extra_with_cuda_code_is_available(extra: str, tmp_path: Path) -> None:
    """The index has the versions that the extra requires."""
    wheels = [line.replace("pytorch,", "").replace(",pytorch", "").replace("[pytorch]", "") for line in EXTRAS[extra]]
    arguments = ["install", "--dry-run", "--ignore-installed", "--no-cache-dir", "--target", str(tmp_path), *wheels]
    done = pip(sys.executable, *arguments)
    assert done.returncode == 0, done.stderr
