"""Memory limits of control groups: both versions, nested groups and containers."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import pytest

from megappo.doctor import machine
from megappo.doctor.machine import memory
from megappo.plan.here import this_cpu
from megappo.runtime.memory import memory_limits
from megappo.runtime.memory.memory_limits import MemoryLimit, memory_limit

GB = 10**9
V1_UNLIMITED = 9223372036854771712


def proc(folder: Path, groups: str, *mounts: str) -> Path:
    """Write a process file system with these lines of /proc/self/cgroup and mountinfo."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(groups)
    (folder / "proc/self/mountinfo").write_text("".join(f"{mount}\n" for mount in mounts))
    return folder / "proc"


def group(folder: Path, version: int, limit: int | str, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    statistic = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"cache 5\n{statistic} {cache}\n")


def v2(mount: Path, root: str = "/") -> str:
    return f"31 23 0:28 {root} {mount} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def v1(mount: Path, root: str = "/") -> str:
    return f"35 31 0:32 {root} {mount} rw,relatime - cgroup cgroup rw,memory"


SLURM = "system.slice/slurmstepd.scope/job_7"


@pytest.mark.parametrize("limited", ["job_7", "job_7/step_0", "job_7/step_0/user", "slurmstepd.scope"])
def test_limits_of_parent_groups_apply(tmp_path: Path, limited: str) -> None:
    """SLURM limits the job, the step or the task. The innermost group has no limit."""
    mount = tmp_path / "cgroup"
    path = mount / SLURM / "step_0/user/task_0"
    for folder in (path, *path.parents):
        if mount in folder.parents:
            is_limited = str(folder).endswith(limited)
            group(folder, 2, 64 * GB if is_limited else "max", 40 * GB, 10 * GB)
    limit = memory_limit(proc(tmp_path, f"0::/{SLURM}/step_0/user/task_0\n", v2(mount)))
    assert limit == MemoryLimit(64 * GB, 34 * GB)


def test_smallest_limit_applies(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    group(mount / "a/b", 2, 50 * GB, 1 * GB)
    group(mount / "a", 2, 60 * GB, 55 * GB)
    assert memory_limit(proc(tmp_path, "0::/a/b\n", v2(mount))) == MemoryLimit(50 * GB, 5 * GB)


def test_limit_of_version_1(tmp_path: Path) -> None:
    mount = tmp_path / "memory"
    group(mount / "slurm/uid_1/job_7", 1, 32 * GB, 8 * GB, 2 * GB)
    group(mount / "slurm/uid_1/job_7/step_0", 1, V1_UNLIMITED, 8 * GB)
    groups = "9:cpu:/\n4:memory:/slurm/uid_1/job_7/step_0\n0::/\n"
    cpu = v1(tmp_path / "cpu").replace("rw,memory", "rw,cpu")
    assert memory_limit(proc(tmp_path, groups, cpu, v1(mount))) == MemoryLimit(32 * GB, 26 * GB)


def test_limit_with_both_versions(tmp_path: Path) -> None:
    """In the hybrid layout of systemd, version 2 exists but controls no memory."""
    memory_mount, unified = tmp_path / "memory", tmp_path / "unified"
    group(memory_mount / "job", 1, 16 * GB, 1 * GB)
    (unified / "job").mkdir(parents=True)
    groups = "4:cpu,memory:/job\n0::/job\n"
    limit = memory_limit(proc(tmp_path, groups, v1(memory_mount).replace("rw,memory", "rw,cpu,memory"), v2(unified)))
    assert limit == MemoryLimit(16 * GB, 15 * GB)


@pytest.mark.parametrize("root", ["/docker/abc", "/"])
def test_container_group_is_at_the_mount_point(tmp_path: Path, root: str) -> None:
    """The path is the path of the host, or a path in a separate namespace."""
    mount = tmp_path / "with space"
    group(mount, 2, 8 * GB, 1 * GB)
    line = v2(mount, root).replace("with space", "with\\040space")
    path = "/docker/abc" if root != "/" else "/../../other"
    assert memory_limit(proc(tmp_path, f"0::{path}\n", line)) == MemoryLimit(8 * GB, 7 * GB)


def test_other_mounts_can_have_any_format(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    group(mount / "job", 2, 8 * GB, 1 * GB)
    folder = proc(tmp_path, "0::/job\n", v2(mount))
    lines = b"40 31 0:40 / /tmp\xff rw - tmpfs  rw\n" + (folder / "self/mountinfo").read_bytes()
    (folder / "self/mountinfo").write_bytes(lines)
    assert memory_limit(folder) == MemoryLimit(8 * GB, 7 * GB)


@pytest.mark.parametrize("groups", ["", "0::/\n", "4:memory:/gone\n"])
def test_unlimited_memory(tmp_path: Path, groups: str) -> None:
    assert memory_limit(proc(tmp_path, groups, v2(tmp_path / "none"))) == MemoryLimit(math.inf, math.inf)
    assert memory_limit(tmp_path / "no such folder") == MemoryLimit(math.inf, math.inf)


def test_doctor_and_plan_use_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    total = psutil.virtual_memory().total
    for module in (machine, memory_limits):
        monkeypatch.setattr(module, "memory_limit", lambda: MemoryLimit(total / 2, 1.5 * GB))
    finding = memory(1)
    assert finding.state == "slow" and finding.text.startswith("2 GB free for 1 rank, within a limit of ")
    assert this_cpu().memory_bytes == total / 2
    monkeypatch.setattr(machine, "memory_limit", MemoryLimit)
    assert "limit" not in memory(1).text
