"""Detection of the devices, nodes, scheduler and disk for a new configuration."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megappo.config import ConfigError
from megappo.plan.hardware.machine_file import find_machine
from megappo.plan.hardware.machines import MACHINES, Machine
from megappo.plan.here import machine_like, this_cpu

_ANSWER_SECONDS = 20
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "fuse.glusterfs", "afs", "smb", "cifs", "fuse.juicefs")
"""Prefixes of the types of file systems that several machines share."""
_GRES = re.compile(r"gpu:(?:([A-Za-z][\w.-]*):)?(\d+)")
_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_SINFO = ("sinfo", "--noheader", "--format", "%G")


@dataclass(frozen=True)
class RunTarget:
    """Devices, scheduler and disk of a new configuration."""

    machine: Machine
    devices: int
    """Number of devices per node. Each device has one rank."""
    nodes: int
    scheduler: str
    """Name of the scheduler: `slurm`, or "" without a scheduler."""
    disk: str
    """Type of the file system of the working directory."""

    def alone(self) -> RunTarget:
        """Return a target with one of the devices."""
        return replace(self, devices=1, nodes=1)

    @property
    def ranks(self) -> int:
        """Number of ranks of the run."""
        return self.devices * self.nodes

    @property
    def summary(self) -> str:
        """Description of the devices."""
        each = f"{self.devices} x {self.machine.summary}" if self.machine.is_cuda else self.machine.summary
        return f"{self.nodes} nodes of {each}" if self.nodes > 1 else each

    @property
    def has_shared_disk(self) -> bool:
        """Whether several machines share the working directory."""
        return self.disk.startswith(_SHARED)


def find_target(machine: str | None, devices: int | None, nodes: int | None, folder: Path) -> RunTarget:
    """Detect the target of a run.

    Missing arguments are detected on this machine, or with SLURM if only the cluster's nodes have GPUs.

    Raises ConfigError for an unknown machine, too many devices per node, or missing GPUs.
    """
    own_gpus = _own_gpus()
    scheduler = "slurm" if shutil.which("sinfo") or "SLURM_JOB_ID" in os.environ else ""
    target, count = own_gpus or (_slurm_gpus() if scheduler else None) or (this_cpu(), 1)
    if machine is not None:
        target, count = find_machine(machine), count if own_gpus else 1
        if target.is_cuda and not own_gpus and devices is not None and devices > target.devices_per_node:
            nodes_for = -(-devices // target.devices_per_node)
            raise ConfigError(
                f"--gpus is {devices} and counts the devices of a node, but a node of {target.name} has "
                f"{target.devices_per_node}; for {devices} in all write --nodes {nodes_for} --gpus "
                f"{target.devices_per_node}"
            )
    if not target.is_cuda and machine is None and (devices or nodes):
        raise ConfigError(
            "neither nvidia-smi nor sinfo shows a GPU here, but --gpus or --nodes requires GPUs; set --machine "
            "(h100, or cpu for ranks on CPUs)"
        )
    return RunTarget(target, devices or count, nodes or 1, scheduler, file_system(folder))


def _output_of(command: Sequence[str]) -> str:
    """Return the output of a program, or "" if the program is missing, fails or exceeds the time limit."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _own_gpus() -> tuple[Machine, int] | None:
    rows = [line.rpartition(",") for line in _output_of(_SMI).splitlines()]
    gpus = [(name.strip(), float(mebibytes) * 2**20) for name, _, mebibytes in rows if mebibytes.strip().isdecimal()]
    return (machine_like(*gpus[0]), len(gpus)) if gpus else None


def _slurm_gpus() -> tuple[Machine, int] | None:
    """Return the GPUs of the largest node in SLURM's `gres`. A GPU of unknown type counts as an H100."""
    counts = [(int(count), kind) for kind, count in _GRES.findall(_output_of(_SINFO))]
    if not counts:
        return None
    count, kind = max(counts)
    alike = [m for name, m in MACHINES.items() if m.is_cuda and name.split("-")[0] in kind.lower()]
    return (alike or [MACHINES["h100"]])[0], count


def file_system(folder: Path, mounts: str | None = None) -> str:
    """Return the type of a folder's file system from `/proc/mounts` or from `mounts`, or "" if it is unknown."""
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text()
        except OSError:
            return ""
    rows = [line.split(" ") for line in mounts.splitlines()]
    above = [(len(row[1]), row[2]) for row in rows if len(row) > 2 and folder.resolve().is_relative_to(row[1])]
    return max(reversed(above), key=lambda mount: mount[0], default=(0, ""))[1]  # a later mount hides an earlier one
