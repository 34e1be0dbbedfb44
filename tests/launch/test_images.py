"""Container images: both images use the versions of the repository and the CUDA version of torch."""

from __future__ import annotations

import re
import subprocess
import tomllib

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megappo.runtime.accelerations import ENGINES
from tests.house.lock import pins as versions
from tests.support.places import ROOT

LAUNCH = ROOT / "launch"


def pins(name: str) -> dict[str, Requirement]:
    lines = [line for line in (LAUNCH / name).read_text().splitlines() if line and not line.startswith("#")]
    return {(r := Requirement(line)).name: r for line in lines}


def version(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    assert specifier.operator == "=="
    return specifier.version


def test_both_images_are_the_same() -> None:
    docker, apptainer = (LAUNCH / "Dockerfile").read_text(), (LAUNCH / "megappo.def").read_text()
    image = re.findall(r"^FROM (\S+)$", docker, re.MULTILINE)
    assert image == re.findall(r"^From: (\S+)$", apptainer, re.MULTILINE) and len(image) == 1
    copied: set[tuple[str, str]] = set()
    for arguments in re.findall(r"^COPY (.+)$", docker, re.MULTILINE):
        *sources, target = arguments.split()
        copied |= {(source, target.rstrip("/") + ("/" + source if target.endswith("/") else "")) for source in sources}
    files = apptainer.split("%files")[1].split("%post")[0]
    assert copied == set(re.findall(r"^    (\S+) (/opt/\S+)$", files, re.MULTILINE))
    assert all((ROOT / source).exists() for source, _ in copied)
    run = re.findall(r"^RUN (.+)$", docker, re.MULTILINE)
    assert run == re.findall(r"^    (bash .+)$", apptainer, re.MULTILINE) == ["bash /opt/megappo/launch/image.sh"]
    variables = set(re.findall(r"^ENV (.+)$", docker, re.MULTILINE))
    assert variables == set(re.findall(r"^    export (.+)$", apptainer, re.MULTILINE))


def test_image_script_installs_pinned_packages() -> None:
    script = LAUNCH / "image.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    installed = re.findall(r"^pip install (.+)$", script.read_text(), re.MULTILINE)
    assert 'install_pins "$(type -P python)" "$(pins_of full "$(type -P python)")"\n' in script.read_text()
    assert "--no-build-isolation -r launch/requirements-cuda.txt" in installed
    files = {name for line in installed for name in re.findall(r"-r (launch/\S+)", line)}
    assert all((ROOT / name).is_file() for name in files)


def test_pins_are_compatible() -> None:
    """The version of Transformer Engine supports the CUDA of image and torch, and the Megatron-Core for the Python
    3.12 of the image. Apex is installed from a tag of its repository."""
    accelerators, lock = pins("requirements-cuda.txt"), versions((LAUNCH / "locks" / "full-3.12.txt").read_text())
    engine = accelerators["transformer-engine"]
    (image,) = re.findall(r"nvidia/cuda:(\d+)\.", (LAUNCH / "Dockerfile").read_text())
    assert engine.extras == {f"core_cu{image}", "pytorch"}
    if torch.version.cuda is not None:
        assert torch.version.cuda.split(".")[0] == image
    megatron = lock["megatron-core"]
    assert ".".join(megatron.split(".")[:2]) not in ENGINES, (
        "the metadata of Megatron-Core contains versions of Transformer Engine"
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    older, newer = map(Requirement, extras["te"])
    assert {older.name, newer.name} == {engine.name} and newer.extras == engine.extras
    assert newer.specifier.contains(version(engine))
    assert str(older.marker) == 'python_version < "3.12"' and str(newer.marker) == 'python_version >= "3.12"'
    of_older = SpecifierSet(ENGINES["0.16"])
    assert [of_older.contains(v) == older.specifier.contains(v) for v in ("2.8", "2.9.0", "2.11.3", "2.12")] == [
        True
    ] * 4
    assert re.fullmatch(r"git\+https://github\.com/NVIDIA/apex@\d+\.\d+", str(accelerators["apex"].url))
