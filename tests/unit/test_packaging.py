"""megappo installs beside Hugging Face's package `kernels`, and hides it nowhere."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(out)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True, cwd=out)
    for leftover in ("build", "megappo.egg-info"):
        subprocess.run(["rm", "-rf", str(ROOT / leftover)], check=True)
    return next(out.glob("megappo-*.whl"))


def test_the_wheel_holds_both_packages_and_no_kernels(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {"megappo", "megappo_kernels"} <= tops
    assert "kernels" not in tops
    entry = next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("entry_points.txt"))
    assert "megappo = megappo.cli:main" in zipfile.ZipFile(wheel).read(entry).decode()


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("editable", [True, False])
def test_both_import_side_by_side(wheel: Path, tmp_path: Path, inside: bool, editable: bool) -> None:
    """With a stand-in for Hugging Face's package first on the path, from inside the repository and from outside."""
    site = tmp_path / "site"
    if editable:
        site.mkdir()
        (site / "megappo_kernels").symlink_to(ROOT / "kernels" / "megappo_kernels")
        (site / "megappo").symlink_to(ROOT / "megappo")
    else:
        zipfile.ZipFile(wheel).extractall(site)
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text("OWNER = 'hugging face'\n")
    code = (
        f"import sys; sys.path.insert(1, {str(site)!r}); import kernels, megappo, megappo_kernels; "
        "print(kernels.OWNER, megappo.__version__, megappo_kernels.linear_logprob.__name__)"
    )
    cwd = ROOT if inside else tmp_path
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["hugging", "face", "0.1.0", "linear_logprob"]
