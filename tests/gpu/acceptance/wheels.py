"""Installs wheels from a folder, for machines without network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.gpu.acceptance.table import Row, measured, skipped

MOST_BYTES = 64 * 2**20


def install(folder: Path, site: Path) -> Iterator[Row]:
    """Install each wheel of a folder into `site`, without what it depends on: that is there, or a wheel of its own.

    Nothing is fetched, and nothing that is installed already in the same version. Raises ValueError where the folder
    holds no wheels, or more than travels to a machine at once.
    """
    found = sorted(folder.glob("*.whl"))
    size = sum(path.stat().st_size for path in found)
    if not found:
        raise ValueError(f"--wheels {folder} holds no wheels; put some there with `pip download --no-deps -d {folder}`")
    if size > MOST_BYTES:
        raise ValueError(
            f"--wheels {folder} holds {size / 2**20:.0f} MiB, at most {MOST_BYTES // 2**20}; leave some out"
        )
    for path in found:
        name, wanted = path.name.split("-")[:2]
        if _installed(name) == wanted:
            yield skipped(name, f"{wanted} is installed already")
            continue
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
        command += ["--find-links", str(folder), "--no-deps", "--no-compile", "--upgrade", "--target", str(site)]
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            yield skipped(name, f"{path.name} does not install here: {reason}")
        else:
            yield measured(name, f"{wanted} from {path.name}")


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
