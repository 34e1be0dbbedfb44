"""Locked versions of all packages, and environments with the extras."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.tags import parse_tag
from packaging.utils import canonicalize_name

from megappo.doctor.software import REQUIRED
from tests.house.lock import ADDED, CHOSEN, EXTRAS, LOCKS, Locked, brought_by_torch, fits, locked, pins
from tests.house.test_packaging import clean
from tests.support.places import ROOT

TEXTS = {(kind, python): (LOCKS / f"{kind}-{python}.txt").read_text() for kind, python in CHOSEN}
every = pytest.mark.parametrize(("kind", "python"), CHOSEN, ids=["-".join(chosen) for chosen in CHOSEN])


@every
def test_lock_is_within_the_ranges(kind: str, python: str) -> None:
    """`python -m tests.house.lock` updates the locks after a change of the ranges."""
    versions, extras = pins(TEXTS[kind, python]), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*REQUIRED, *(line for extra in EXTRAS[kind] for line in extras["optional-dependencies"][extra])]
    for requirement in map(Requirement, [*requirements, *ADDED[kind]]):
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement


@every
def test_packages_except_torch_have_hashes(kind: str, python: str) -> None:
    text = TEXTS[kind, python]
    bare = re.findall(r"^([\w.-]+)==\S+$", text, re.MULTILINE)
    assert bare == (["torch", "triton"] if kind == "light" else []), "the builds depend on the index"
    hashes = r"(?: \\\n    --hash=sha256:[0-9a-f]{64})+"
    entries = re.findall(rf"^[\w.-]+==\S+(?: ; .*?)?{hashes}$", text, re.MULTILINE)
    assert len(entries) + len(bare) == len(pins(text))
    assert "://" not in text, "a lock must not contain the address of an index"


def test_pip_is_pinned_with_a_hash() -> None:
    """pip installs the other packages. Images use the same version."""
    scripts = [path.read_text() for path in (ROOT / "launch").rglob("*.sh")]
    assert re.search(r'^PIP_PIN="pip==\S+ --hash=sha256:[0-9a-f]{64}"$', "\n".join(scripts), re.MULTILINE)
    assert not [text for text in scripts if re.search(r"install .*--upgrade", text)]


def test_all_locks_have_the_same_versions() -> None:
    """The exceptions are torch with Triton, and Megatron-Core."""
    first, *others = ({n: v for n, v in pins(text).items() if n != "megatron-core"} for text in TEXTS.values())
    for other in others:
        different = {name for name, version in other.items() if first[name] != version}
        assert different <= {"torch", "triton"}, different


@pytest.mark.parametrize(
    ("tag", "x86_64", "aarch64"),
    [
        ("py3-none-any", True, True), ("py2.py3-none-any", True, True),
        ("cp311-cp311-manylinux_2_28_x86_64", True, False),
        ("cp311-cp311-manylinux_2_17_aarch64.manylinux2014_aarch64", False, True),
        ("cp39-abi3-manylinux_2_28_x86_64", True, False), ("cp39-cp39-manylinux_2_28_x86_64", False, False),
        ("cp312-cp312-manylinux_2_28_x86_64", False, False), ("cp312-abi3-manylinux_2_28_x86_64", False, False),
        ("cp311-cp311-musllinux_1_2_x86_64", False, False), ("cp311-cp311-macosx_11_0_arm64", False, False),
        ("py2-none-any", False, False),
    ],
)  # fmt: skip
def test_wheels_of_other_platforms_are_excluded(tag: str, x86_64: bool, aarch64: bool) -> None:
    assert tuple(any(fits(t, "3.11", m) for t in parse_tag(tag)) for m in ("x86_64", "aarch64")) == (x86_64, aarch64)


def test_package_is_locked_for_required_machines() -> None:
    def file(name: str, digest: str) -> dict[str, object]:
        return {"url": f"somewhere/{name}", "hashes": {"sha256": digest}}

    wheels = [file("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", "ab"), file("a-1-cp310-cp310-win_amd64.whl", "cd")]
    package = {"name": "a", "version": "1", "wheels": wheels, "sdist": file("a-1.tar.gz", "ef")}
    assert locked(package, "3.11").hashes == ("ab", "ef"), "other machines need the source distribution"
    one = locked(package | {"marker": "platform_machine == 'x86_64'"}, "3.11")
    assert one == Locked("a", "1", "x86_64", ("ab",))
    assert one.lines() == "a==1 ; platform_machine == 'x86_64' \\\n    --hash=sha256:ab"


def test_dependencies_of_torch_alone_are_not_locked() -> None:
    text = """cuda-bindings==13
    # via
    #   megatron-core
    #   torch
megatron-core==0.19.2
    # via megappo (pyproject.toml)
nvidia-cublas==13
    # via nvidia-cudnn
nvidia-cudnn==9
    # via torch
sympy==1
    # via torch
torch==2
    # via megappo (pyproject.toml)
triton==3
    # via torch
"""
    assert brought_by_torch(text) == {"torch", "triton", "nvidia-cublas", "nvidia-cudnn"}


OPTIONAL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
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


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip the tests if no package index is available."""
    to = str(tmp_path_factory.mktemp("index"))
    download = pip(sys.executable, "download", "--no-deps", "--no-cache-dir", "-d", to, "packaging")
    if download.returncode:
        pytest.skip(f"no package index can be reached: {download.stderr.splitlines()[-1]}")


@pytest.mark.waits
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("extra", sorted(set(OPTIONAL) - BUILT_ON_GPUS))
def test_extra_installs(extra: str, tmp_path: Path) -> None:
    """The installed packages are compatible and within the ranges of the extra, and megappo can be imported."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "fresh")], check=True)
    python = tmp_path / "fresh" / "bin" / "python"
    done = pip(python, "install", "--no-cache-dir", f"{ROOT}[{extra}]")
    clean()
    assert done.returncode == 0, done.stderr
    fits = pip(python, "check")
    assert fits.returncode == 0, fits.stdout
    program = PROGRAM.format(requirements=OPTIONAL[extra])
    ran = subprocess.run(
        [str(python), "-c", program], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    done = pip(python, "uninstall", "--yes", "torch")  # this frees most of the disk space
    assert done.returncode == 0, done.stderr


@pytest.mark.waits
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("extra", sorted(BUILT_ON_GPUS))
def test_extra_with_cuda_code_is_available(extra: str, tmp_path: Path) -> None:
    """The index has the versions that the extra requires."""
    wheels = [line.replace("pytorch,", "").replace(",pytorch", "").replace("[pytorch]", "") for line in OPTIONAL[extra]]
    arguments = ["install", "--dry-run", "--ignore-installed", "--no-cache-dir", "--target", str(tmp_path), *wheels]
    done = pip(sys.executable, *arguments)
    assert done.returncode == 0, done.stderr
