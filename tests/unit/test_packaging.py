"""megappo installs beside Hugging Face's package `kernels`, and hides it nowhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
NO_DEPENDENCIES = ["--no-deps", "--no-build-isolation"]


def clean() -> None:
    """Remove what building leaves in the repository."""
    for leftover in ("build", "megappo.egg-info"):
        shutil.rmtree(ROOT / leftover, ignore_errors=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", *NO_DEPENDENCIES, "-w", str(out), str(ROOT)], check=True, cwd=out)
    clean()
    return next(out.glob("megappo-*.whl"))


def test_the_wheel_holds_both_packages_and_no_kernels(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {"megappo", "megappo_kernels"} <= tops
    assert "kernels" not in tops
    sources = {str(p.relative_to(ROOT / "kernels")) for p in (ROOT / "kernels").rglob("*.py")}
    assert sources <= set(names), "every module of the kernels is packaged"
    entry = next(n for n in names if n.endswith("entry_points.txt"))
    assert "megappo = megappo.cli:main" in zipfile.ZipFile(wheel).read(entry).decode()


@pytest.fixture(scope="module", params=["editable", "wheel"])
def interpreter(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Python of an environment with Hugging Face's kernels and megappo; the rest comes from this environment."""
    folder = tmp_path_factory.mktemp(request.param)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "parent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    what = ["-e", str(ROOT)] if request.param == "editable" else [str(wheel)]
    install = [*PIP, "--python", str(python), "install", *NO_DEPENDENCIES]
    subprocess.run([*install, "kernels==0.17.2", *what], check=True, cwd=folder)
    yield python
    clean()


@pytest.mark.parametrize("inside", [True, False])
def test_both_import_side_by_side(interpreter: Path, tmp_path: Path, inside: bool) -> None:
    code = (
        "import kernels, megappo, megappo_kernels\n"
        "print(kernels.__version__, megappo.__version__, megappo_kernels.linear_logprob.__name__)\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    where = ROOT if inside else tmp_path
    done = subprocess.run(
        [str(interpreter), "-c", code], cwd=where, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["0.17.2", "0.1.0", "linear_logprob"], done.stderr
