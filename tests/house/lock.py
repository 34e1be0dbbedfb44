"""Write the lock files in launch/locks, from the ranges in megappo/requirements.txt and the extras in pyproject.toml.

Usage: python -m tests.house.lock [--upgrade]      requires uv (`pip install uv`) and a package index

A lock file lists every package of an environment. A locked version changes only if the ranges exclude the version, or
with `--upgrade`. All locks use the versions of the first lock, except for torch, Triton and Megatron-Core. The light
lock contains torch without hashes, because an index may provide builds for CPUs, GPUs or both. The build also
determines which libraries are installed with torch.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

from tests.support.places import ROOT

LOCKS = ROOT / "launch" / "locks"
EXTRAS = {"full": ("tasks", "test", "sglang"), "light": ("tasks", "test")}
"""Extras of each kind of environment."""
ADDED = {"full": (), "light": ("torch==2.13.0", "triton")}
"""Additional requirements: the newest torch with a small build for CPUs, and Triton, which compiles kernels."""
CHOSEN = (("full", "3.11"), ("full", "3.12"), ("light", "3.11"), ("light", "3.12"))
"""All locks (kind, Python version). The first lock has all packages, in versions that all other locks support."""
MACHINES = ("x86_64", "aarch64")
_OWN = ("torch", "triton", "megatron-core")
"""Packages whose versions may differ between locks."""
_OF_TORCH = re.compile(r"(nvidia|cuda)-|(torch|triton)$")
"""Names of packages that can be part of a build of torch."""


@dataclass(frozen=True)
class Locked:
    """Locked version of a package."""

    name: str
    version: str
    machine: str
    """Element of MACHINES that needs the package, or "" for all machines."""
    hashes: tuple[str, ...]

    def lines(self) -> str:
        """Return the requirement in the format of pip."""
        marker = f" ; platform_machine == '{self.machine}'" if self.machine else ""
        return " \\\n    ".join([f"{self.name}=={self.version}{marker}", *(f"--hash=sha256:{h}" for h in self.hashes)])


def locked(package: Mapping[str, Any], python: str) -> Locked:
    """Return the locked version for an entry in a `pylock.toml`."""
    machines = [machine for machine in MACHINES if f"platform_machine == '{machine}'" in package.get("marker", "")]
    hashes, covered = [], set[str]()
    for wheel in package.get("wheels", ()):
        *_, tags = parse_wheel_filename(wheel["url"].rsplit("/", 1)[1])
        if fitting := {machine for tag in tags for machine in MACHINES if fits(tag, python, machine)}:
            covered |= fitting
            hashes.append(wheel["hashes"]["sha256"])
    if "sdist" in package and not covered.issuperset(machines or MACHINES):
        hashes.append(package["sdist"]["hashes"]["sha256"])
    machine = machines[0] if len(machines) == 1 else ""
    return Locked(package["name"], package["version"], machine, tuple(sorted(hashes)))


def fits(tag: Tag, python: str, machine: str) -> bool:
    """Return whether a wheel supports this Python version on Linux."""
    major, minor = map(int, python.split("."))
    python_tag = re.fullmatch(r"(?:py|cp)(\d)(\d*)", tag.interpreter)
    if python_tag is None or int(python_tag[1]) != major:
        return False
    own = (
        not python_tag[2] or int(python_tag[2]) == minor or (int(python_tag[2]) < minor and tag.abi in ("abi3", "none"))
    )
    return own and (tag.platform == "any" or bool(re.fullmatch(rf"(many)?linux.*_{machine}", tag.platform)))


def brought_by_torch(annotated: str) -> set[str]:
    """Return the packages that only torch requires. `annotated` is output of uv that lists the dependents of each
    package."""
    required_by: dict[str, set[str]] = {}
    for name, comments in re.findall(r"^([\w.-]+)==.*\n((?:    #.*\n)*)", annotated, re.MULTILINE):
        required_by[name] = set(re.findall(r"(?:# via|#  ) +(\S+)", comments))
    names = {"torch", "triton"}
    while more := {n for n, by in required_by.items() if _OF_TORCH.match(n) and by and by <= names} - names:
        names |= more
    return names


class Resolver:
    """Wrapper of uv for one kind of environment and one Python version."""

    def __init__(self, kind: str, python: str, folder: Path) -> None:
        self._kind, self._python, self._folder = kind, python, folder
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        required = (ROOT / "megappo" / "requirements.txt").read_text().splitlines()
        names = [line for line in required if not line.startswith("#")]
        names += [*(line for extra in EXTRAS[kind] for line in extras[extra]), *ADDED[kind]]
        platform = f"sys_platform == 'linux' and python_version == '{python}'"
        environments = [f"{platform} and platform_machine == '{machine}'" for machine in MACHINES]
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "megappo"\nversion = "0"\nrequires-python = ">={python}"\ndependencies = {names!r}\n'
            f"[tool.uv]\nenvironments = {environments!r}\n"
        )

    def _resolve(self, form: str, preferred: Mapping[str, str], constraints: Mapping[str, str]) -> str:
        """Resolve in a format of uv, `requirements.txt` or `pylock.toml`. `preferred` are the preferred versions."""
        out, bounds = self._folder / f"{'pylock.' * (form == 'pylock.toml')}out.toml", self._folder / "constraints.txt"
        if preferred:
            out.write_text(as_text(preferred))
        bounds.write_text(as_text(constraints))
        executable = shutil.which("uv")
        uv = [executable] if executable else [sys.executable, "-m", "uv"]
        command = [*uv, "pip", "compile", "pyproject.toml", "--quiet", "--universal", "--no-header", "--format", form]
        command += ["--python-version", self._python, "--constraints", str(bounds), "--output-file", str(out)]
        subprocess.run(command, cwd=self._folder, check=True, stdout=subprocess.DEVNULL)
        return out.read_text()

    def lock(self, preferred: Mapping[str, str]) -> Iterator[str]:
        """Yield the lines of a lock. The versions in `preferred` are used if possible."""
        annotated = self._resolve("requirements.txt", preferred, {})
        whole = tomllib.loads(self._resolve("pylock.toml", {}, pins(annotated)))
        packages = [locked(package, self._python) for package in whole["packages"]]
        without = brought_by_torch(annotated) if self._kind == "light" else set()
        yield f"# The {self._kind} environment of Python {self._python}; written by `python -m tests.house.lock`."
        yield from (f"{p.name}=={p.version}" for p in packages if p.name in without & {"torch", "triton"})
        yield from (p.lines() for p in packages if p.name not in without)


def as_text(versions: Mapping[str, str]) -> str:
    """Return the versions in the format of pip."""
    return "".join(f"{name}=={version}\n" for name, version in versions.items())


def pins(text: str) -> dict[str, str]:
    """Return the versions in a lock, by package name."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))


def main() -> None:
    """Write all locks. The other locks use the versions of the first lock."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="use the newest versions within the ranges")
    keeps_versions = not parser.parse_args().upgrade
    LOCKS.mkdir(exist_ok=True)
    first: dict[str, str] = {}
    for kind, python in CHOSEN:
        path = LOCKS / f"{kind}-{python}.txt"
        preferred = pins(path.read_text()) if keeps_versions and path.exists() else {}
        shared = {name: version for name, version in first.items() if name not in _OWN and not _OF_TORCH.match(name)}
        with tempfile.TemporaryDirectory() as folder:
            text = "\n".join(Resolver(kind, python, Path(folder)).lock(preferred | shared)) + "\n"
        path.write_text(text)
        first = first or pins(text)
        print(f"{path.relative_to(ROOT)}: {len(pins(text))} packages", flush=True)


if __name__ == "__main__":
    main()
