"""Installation of wheels from a folder, for machines without network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.gpu.acceptance.table import Row, measured, skipped

MOST_BYTES = 64 * 2**20


def install(folder: Path, site: Path) -> Iterator[Row]:
    """Install each wheel of a folder into `site` without dependencies, which are installed or separate wheels.

    Nothing is downloaded, and packages that are installed in the same version are skipped. Raises ValueError if the
    folder contains no wheels, or more than `MOST_BYTES`.
    """
    files = sorted(folder.glob("*.whl"))
    size = sum(path.stat().st_size for path in files)
    if not files:
        raise ValueError(f"--wheels {folder} contains no wheels; add some with `pip download --no-deps -d {folder}`")
    if size > MOST_BYTES:
        raise ValueError(
            f"--wheels {folder} contains {size / 2**20:.0f} MiB, must be at most {MOST_BYTES // 2**20}; remove some"
        )
    for path in files:
        name, version_of_wheel = path.name.split("-")[:2]
        if _installed(name) == version_of_wheel:
            yield skipped(name, f"{version_of_wheel} is installed already")
            continue
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
        command += ["--find-links", str(folder), "--no-deps", "--no-compile", "--upgrade", "--target", str(site)]
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no output of pip"])[-1]
            yield skipped(name, f"{path.name} does not install here: {reason}")
        else:
            yield measured(name, f"{version_of_wheel} from {path.name}")


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
