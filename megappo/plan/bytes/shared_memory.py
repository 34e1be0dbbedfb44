"""Requirements of the weight stream to colocated servers on a CPU: shared memory for the buckets, and a folder whose
path is short enough for a socket of torch.

torch starts the program `torch_shm_manager`, which removes shared memory after a crash. The program listens on a Unix
socket in TMPDIR.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from megappo.config import Config
from megappo.plan.bytes.memory import bucket_bytes
from megappo.plan.inputs import Setup

SHARED_MEMORY = Path("/dev/shm")
_TEMPORARY = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
"""Environment variables that name torch's folder for sockets. The first one that is set counts (c10/util/tempfile.cpp
of torch 2.13)."""
_SOCKET_BYTES = 107
"""Bytes of the longest name of a Unix socket: `sun_path` of unix(7) without the final zero."""
_MANAGER_SOCKET = "/torch-shm-dir-XXXXXX/manager.sock"


def shared_buckets_bytes(config: Config, setup: Setup, world_size: int, local_world_size: int | None) -> float:
    """Bytes of shared memory on one machine for buckets of the weight stream; 0 if weights take another way, or
    if the engine is custom.

    A machine with all ranks has two buckets. Otherwise each rank on the machine has two buckets. `local_world_size`:
    ranks on this machine; None if unknown.
    """
    servers, settings = setup.work.servers, config.rollout.server_settings
    if setup.work.on_cuda or servers is None or not servers.colocated or settings.urls or not settings.is_built_in:
        return 0.0
    owners = 1 if local_world_size in (None, world_size) else local_world_size
    return 2.0 * bucket_bytes(setup) * (owners or 1)


def room_problem(needed_bytes: float, folder: Path = SHARED_MEMORY) -> str | None:
    """Reason why a folder cannot store `needed_bytes` of buckets, with its remedy. None if the folder can."""
    remedy = "mount a larger tmpfs there (containers: --ipc=host or --shm-size=16g)"
    if not folder.is_dir():
        return f"the weight sync needs {_size(needed_bytes)} of shared memory, and {folder} does not exist; {remedy}"
    if not os.access(folder, os.W_OK):
        return f"the weight sync needs {_size(needed_bytes)} of {folder}, which is not writable; {remedy}"
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        return (
            f"the weight sync needs {_size(needed_bytes)} of {folder} for buckets, and {_size(free)} are free; "
            f"lower rollout.sync_bucket_bytes, or {remedy}"
        )
    return None


def socket_problem(environment: Mapping[str, str]) -> str | None:
    """Reason why torch cannot create a socket in the temporary folder, with its remedy. None if torch can."""
    name = next((name for name in _TEMPORARY if name in environment), None)
    folder = "/tmp" if name is None else environment[name]
    cause = folder if name is None else f"{name}={folder}"
    length, most = len(os.fsencode(folder)), _SOCKET_BYTES - len(_MANAGER_SOCKET)
    remedy = "export TMPDIR=/tmp, or the path of another short folder"
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        return f"torch needs a writable folder for the sockets of the weight sync, and {cause} is not one; {remedy}"
    if length > most:
        return (
            f"{cause} has {length} bytes, and a folder for the sockets of the weight sync has at most {most}; {remedy}"
        )
    return None


def _size(n_bytes: float) -> str:
    """A number of bytes in MB or GB."""
    return f"{n_bytes / 1e9:.3g} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.3g} MB"
