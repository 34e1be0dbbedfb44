"""Lock files in launch/locks: versions are within the ranges and the same in all locks, and have hashes."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.tags import parse_tag
from packaging.utils import canonicalize_name

from megappo.doctor.software import REQUIRED
from tests.house.lock import ADDED, CHOSEN, EXTRAS, LOCKS, Locked, brought_by_torch, fits, locked, pins
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
        ("py3-none-any", True, True),
        ("py2.py3-none-any", True, True),
        ("cp311-cp311-manylinux_2_28_x86_64", True, False),
        ("cp311-cp311-manylinux_2_17_aarch64.manylinux2014_aarch64", False, True),
        ("cp39-abi3-manylinux_2_28_x86_64", True, False),
        ("cp39-cp39-manylinux_2_28_x86_64", False, False),
        ("cp312-cp312-manylinux_2_28_x86_64", False, False),
        ("cp312-abi3-manylinux_2_28_x86_64", False, False),
        ("cp311-cp311-musllinux_1_2_x86_64", False, False),
        ("cp311-cp311-macosx_11_0_arm64", False, False),
        ("py2-none-any", False, False),
    ],
)
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
