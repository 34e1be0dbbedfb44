"""Writes launch/locks anew: what environments are made of, to the file, from the ranges of megappo/requirements.txt and
of the extras in pyproject.toml.

Usage: python -m tests.house.lock [--upgrade]      needs uv (`pip install uv`) and a package index

A version stays what it is while the ranges take it, unless `--upgrade`. All locks have the same versions, those of the
first; only torch, Triton and Megatron-Core differ. The light one names torch without hashes: an index may have builds
of it for CPUs, for GPUs or both, and which libraries come along follows from the build.
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
"""What a kind of environment has besides what megappo requires."""
ADDED = {"full": (), "light": ("torch==2.13.0", "triton")}
"""The newest torch that indexes have a small build for CPUs of, and Triton, which compiles kernels."""
CHOSEN = (("full", "3.11"), ("full", "3.12"), ("light", "3.11"), ("light", "3.12"))
"""The first has everything, of versions that any of these can have."""
MACHINES = ("x86_64", "aarch64")
_OWN = ("torch", "triton", "megatron-core")
"""Packages whose versions may differ between locks."""
_OF_TORCH = re.compile(r"(nvidia|cuda)-|(torch|triton)$")
"""Names of what a build of torch brings along, or not."""


@dataclass(frozen=True)
class Locked:
    """One version of a package."""

    name: str
    version: str
    machine: str
    """For which of MACHINES alone; "" for all."""
    hashes: tuple[str, ...]

    def lines(self) -> str:
        """As pip reads it."""
        marker = f" ; platform_machine == '{self.machine}'" if self.machine else ""
        return " \\\n    ".join([f"{self.name}=={self.version}{marker}", *(f"--hash=sha256:{h}" for h in self.hashes)])


def locked(package: Mapping[str, Any], python: str) -> Locked:
    """What a lock says of a package, by its entry in a `pylock.toml`."""
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
    """Whether a wheel is for this Python on Linux."""
    major, minor = map(int, python.split("."))
    wanted = re.fullmatch(r"(?:py|cp)(\d)(\d*)", tag.interpreter)
    if wanted is None or int(wanted[1]) != major:
        return False
    own = not wanted[2] or int(wanted[2]) == minor or (int(wanted[2]) < minor and tag.abi in ("abi3", "none"))
    return own and (tag.platform == "any" or bool(re.fullmatch(rf"(many)?linux.*_{machine}", tag.platform)))


def brought_by_torch(annotated: str) -> set[str]:
    """Names in a text of uv's, which says who wants each, that torch brings along and nobody else wants."""
    wanted_by: dict[str, set[str]] = {}
    for name, comments in re.findall(r"^([\w.-]+)==.*\n((?:    #.*\n)*)", annotated, re.MULTILINE):
        wanted_by[name] = set(re.findall(r"(?:# via|#  ) +(\S+)", comments))
    found = {"torch", "triton"}
    while more := {n for n, by in wanted_by.items() if _OF_TORCH.match(n) and by and by <= found} - found:
        found |= more
    return found


class Resolver:
    """uv, for one kind of environment and one Python."""

    def __init__(self, kind: str, python: str, folder: Path) -> None:
        self._kind, self._python, self._folder = kind, python, folder
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        required = (ROOT / "megappo" / "requirements.txt").read_text().splitlines()
        wanted = [line for line in required if not line.startswith("#")]
        wanted += [*(line for extra in EXTRAS[kind] for line in extras[extra]), *ADDED[kind]]
        here = f"sys_platform == 'linux' and python_version == '{python}'"
        environments = [f"{here} and platform_machine == '{machine}'" for machine in MACHINES]
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "megappo"\nversion = "0"\nrequires-python = ">={python}"\ndependencies = {wanted!r}\n'
            f"[tool.uv]\nenvironments = {environments!r}\n"
        )

    def _resolve(self, form: str, kept: Mapping[str, str], constraints: Mapping[str, str]) -> str:
        """A resolution in one of uv's forms, `requirements.txt` or `pylock.toml`; `kept` are versions to prefer."""
        out, bounds = self._folder / f"{'pylock.' * (form == 'pylock.toml')}out.toml", self._folder / "constraints.txt"
        if kept:
            out.write_text(as_text(kept))
        bounds.write_text(as_text(constraints))
        found = shutil.which("uv")
        uv = [found] if found else [sys.executable, "-m", "uv"]
        command = [*uv, "pip", "compile", "pyproject.toml", "--quiet", "--universal", "--no-header", "--format", form]
        command += ["--python-version", self._python, "--constraints", str(bounds), "--output-file", str(out)]
        subprocess.run(command, cwd=self._folder, check=True, stdout=subprocess.DEVNULL)
        return out.read_text()

    def lock(self, kept: Mapping[str, str]) -> Iterator[str]:
        """The lines of a lock, with the versions of `kept` where they can be."""
        annotated = self._resolve("requirements.txt", kept, {})
        whole = tomllib.loads(self._resolve("pylock.toml", {}, pins(annotated)))
        packages = [locked(package, self._python) for package in whole["packages"]]
        without = brought_by_torch(annotated) if self._kind == "light" else set()
        yield f"# The {self._kind} environment of Python {self._python}; written by `python -m tests.house.lock`."
        yield from (f"{p.name}=={p.version}" for p in packages if p.name in without & {"torch", "triton"})
        yield from (p.lines() for p in packages if p.name not in without)


def as_text(versions: Mapping[str, str]) -> str:
    """As pip reads them."""
    return "".join(f"{name}=={version}\n" for name, version in versions.items())


def pins(text: str) -> dict[str, str]:
    """Versions by name, of a lock."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))


def main() -> None:
    """Write all locks, the first of which the others follow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that the ranges allow")
    keeps = not parser.parse_args().upgrade
    LOCKS.mkdir(exist_ok=True)
    first: dict[str, str] = {}
    for kind, python in CHOSEN:
        path = LOCKS / f"{kind}-{python}.txt"
        kept = pins(path.read_text()) if keeps and path.exists() else {}
        shared = {name: version for name, version in first.items() if name not in _OWN and not _OF_TORCH.match(name)}
        with tempfile.TemporaryDirectory() as folder:
            text = "\n".join(Resolver(kind, python, Path(folder)).lock(kept | shared)) + "\n"
        path.write_text(text)
        first = first or pins(text)
        print(f"{path.relative_to(ROOT)}: {len(pins(text))} packages", flush=True)


if __name__ == "__main__":
    main()
