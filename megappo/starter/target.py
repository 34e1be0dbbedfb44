"""Where a new configuration will run: devices, nodes, scheduler and disk, as this machine says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megappo.config import ConfigError
from megappo.plan.here import machine_like, this_cpu
from megappo.plan.machine_file import find_machine
from megappo.plan.machines import MACHINES, Machine

_ANSWER_SECONDS = 20
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "fuse.glusterfs", "afs", "smb", "cifs", "fuse.juicefs")
"""Beginnings of the types of file systems that several machines see."""
_GRES = re.compile(r"gpu:(?:([A-Za-z][\w.-]*):)?(\d+)")
_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_SINFO = ("sinfo", "--noheader", "--format", "%G")


@dataclass(frozen=True)
class RunTarget:
    """Devices, scheduler and disk that a configuration is written for."""

    machine: Machine
    devices: int
    """Devices of a node, one for each rank."""
    nodes: int
    scheduler: str
    """`slurm`, or "" without one."""
    disk: str
    """Type of the file system of the working directory."""

    def alone(self) -> RunTarget:
        """One of its devices."""
        return replace(self, devices=1, nodes=1)

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
        return self.devices * self.nodes

    @property
    def summary(self) -> str:
        """The devices in words."""
        each = f"{self.devices} x {self.machine.summary}" if self.machine.is_cuda else self.machine.summary
        return f"{self.nodes} nodes of {each}" if self.nodes > 1 else each

    @property
    def has_shared_disk(self) -> bool:
        """Whether several machines see the working directory."""
        return self.disk.startswith(_SHARED)


def find_target(machine: str | None, devices: int | None, nodes: int | None, folder: Path) -> RunTarget:
    """Where a run will be: what is None is asked of this machine, and of SLURM where its nodes have GPUs that this one
    has not. Raises ConfigError for a machine that is none."""
    here = _own_gpus()
    scheduler = "slurm" if shutil.which("sinfo") or "SLURM_JOB_ID" in os.environ else ""
    found, count = here or (_slurm_gpus() if scheduler else None) or (this_cpu(), 1)
    if machine is not None:
        found, count = find_machine(machine), count if here else 1
        if found.is_cuda and not here and devices is not None and devices > found.devices_per_node:
            nodes_for = -(-devices // found.devices_per_node)
            raise ConfigError(
                f"--gpus is {devices}, and counts the devices of a node, of which {found.name} has "
                f"{found.devices_per_node}; for {devices} in all write --nodes {nodes_for} --gpus "
                f"{found.devices_per_node}"
            )
    if not found.is_cuda and machine is None and (devices or nodes):
        raise ConfigError(
            "neither nvidia-smi nor sinfo shows a GPU here, and --gpus or --nodes asks for some; name it by --machine "
            "(h100, or cpu for ranks on CPUs)"
        )
    return RunTarget(found, devices or count, nodes or 1, scheduler, file_system(folder))


def _said(command: Sequence[str]) -> str:
    """What a program prints; "" where it is not there, fails or does not answer."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _own_gpus() -> tuple[Machine, int] | None:
    rows = [line.rpartition(",") for line in _said(_SMI).splitlines()]
    gpus = [(name.strip(), float(mebibytes) * 2**20) for name, _, mebibytes in rows if mebibytes.strip().isdecimal()]
    return (machine_like(*gpus[0]), len(gpus)) if gpus else None


def _slurm_gpus() -> tuple[Machine, int] | None:
    """GPUs of the node that has most, by SLURM's `gres`; one that it does not name is an H100."""
    found = [(int(count), kind) for kind, count in _GRES.findall(_said(_SINFO))]
    if not found:
        return None
    count, kind = max(found)
    alike = [m for name, m in MACHINES.items() if m.is_cuda and name.split("-")[0] in kind.lower()]
    return (alike or [MACHINES["h100"]])[0], count


def file_system(folder: Path, mounts: str | None = None) -> str:
    """Type of the file system that a folder is on, by `/proc/mounts` or its text; "" where it cannot be told."""
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text()
        except OSError:
            return ""
    rows = [line.split(" ") for line in mounts.splitlines()]
    above = [(len(row[1]), row[2]) for row in rows if len(row) > 2 and folder.resolve().is_relative_to(row[1])]
    return max(reversed(above), key=lambda mount: mount[0], default=(0, ""))[1]  # of equals the last hides the others
