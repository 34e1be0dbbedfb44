"""Memory limits of the control groups of this process, from SLURM, Kubernetes, Docker or systemd.

Both versions of control groups are supported (cgroups(7)). A group is also limited by its parents, so the smallest
limit applies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_V1_UNLIMITED = 1 << 60
"""Lower bound of the numbers that mean no limit in version 1. The usual number is near 2^63."""


@dataclass(frozen=True)
class MemoryLimit:
    """Memory limit of control groups, for this process together with all other processes of its groups."""

    total_bytes: float = math.inf
    """Smallest limit; infinite without a limit."""
    free_bytes: float = math.inf
    """Smallest amount of free memory of a group. Page cache that the kernel can reclaim counts as free."""


def memory_limit(proc: Path = Path("/proc")) -> MemoryLimit:
    """Return the smallest limits of all groups of this process, infinite without control groups. `proc`: the process
    file system."""
    limits = list(_limits(proc))
    return MemoryLimit(
        min((limit for limit, _ in limits), default=math.inf), min((free for _, free in limits), default=math.inf)
    )


def machine_bytes() -> float:
    """Return the memory for processes on this machine: the memory of the machine, or the limit of this process if
    smaller."""
    import psutil

    return min(float(psutil.virtual_memory().total), memory_limit().total_bytes)


def _limits(proc: Path) -> Iterator[tuple[float, float]]:
    """Yield (limit, free bytes) for each group with a limit, starting with the innermost group."""
    for mount, folder, version in _groups(proc):
        while True:
            limit = _limit_v2(folder) if version == 2 else _limit_v1(folder)
            if limit is not None:
                yield limit
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent


def _groups(proc: Path) -> Iterator[tuple[Path, Path, int]]:
    """Yield (mount point, folder of the group, version) for each hierarchy with a memory controller."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        mounts = (proc / "self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            before, _, after = mount.partition(" - ")
            root, place = (_unescaped(field) for field in before.split()[3:5])
            kind, _, options = after.split(" ", 2)
            is_own = "memory" in options.split(",") if controllers else True
            if kind == ("cgroup" if controllers else "cgroup2") and is_own:
                # A container sees its group at the mount point. The path is then not below the root of the mount.
                inner = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
                yield Path(place), Path(place) / inner, 1 if controllers else 2
                break


def _unescaped(field: str) -> str:
    """Decode a field of mountinfo. For example, a space is written as `\\040`."""
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _limit_v2(folder: Path) -> tuple[float, float] | None:
    limit = _number(folder / "memory.max")  # "max" is no number
    used = _number(folder / "memory.current")
    if limit is None or used is None:
        return None
    return limit, max(0.0, limit - used + _statistic(folder, "inactive_file"))


def _limit_v1(folder: Path) -> tuple[float, float] | None:
    limit = _number(folder / "memory.limit_in_bytes")
    used = _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= _V1_UNLIMITED:
        return None
    return limit, max(0.0, limit - used + _statistic(folder, "total_inactive_file"))


def _number(path: Path) -> float | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return float(text) if text.isdecimal() else None


def _statistic(folder: Path, name: str) -> float:
    """Return a number of memory.stat, or 0 if the number is missing."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    return next((float(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0.0)
