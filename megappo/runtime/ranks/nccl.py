"""NCCL settings that trainers and servers of a broadcast group must share. They may be on different machines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Values that SGLang sets in its servers by default (0.5.23, entrypoints/engine.py). A trainer with NCCL's own defaults
would register memory in a different way than the servers of its group."""


# torch reads this variable when it creates a group on NCCL.
_ON_ERROR, _NOTHING = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"


@contextmanager
def errors_are_the_callers() -> Iterator[None]:
    """Create groups without torch's NCCL watchdog within the context. If the other end of a group dies, the watchdog
    would end this process. The caller that waits for a collective has to detect the loss."""
    before = os.environ.get(_ON_ERROR)
    os.environ[_ON_ERROR] = _NOTHING
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ON_ERROR]
        else:
            os.environ[_ON_ERROR] = before


def share_settings(environment: MutableMapping[str, str]) -> None:
    """Set NCCL's variables for trainers and their servers, before NCCL reads them. Values of the user take precedence
    for both."""
    for name, value in SETTINGS.items():
        environment.setdefault(name, value)


@dataclass(frozen=True)
class Stack:
    """Versions and NCCL settings of one end of a group."""

    torch: str
    """Version without the build, for example 2.14.1."""
    nccl: str
    """Version of NCCL; "" if torch was built without NCCL."""
    cumem: str
    nvls: str
    """Values of NCCL's variables in the environment."""

    @property
    def versions(self) -> str:
        """Versions as part of a sentence."""
        return f"torch {self.torch} and {f'NCCL {self.nccl}' if self.nccl else 'no NCCL'}"

    @property
    def settings(self) -> str:
        """Settings as part of a sentence."""
        return f"NCCL_CUMEM_ENABLE={self.cumem} and NCCL_NVLS_ENABLE={self.nvls}"

    def labels(self) -> dict[str, str]:
        """Return the labels with which a server publishes its stack; see `read_labels`."""
        return {f"megappo_{name}": value for name, value in asdict(self).items()}


def own_stack(environment: Mapping[str, str]) -> Stack:
    """Return the stack of this process, or of a server that this process starts with this environment."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    cumem, nvls = (environment.get(name, default) for name, default in SETTINGS.items())
    return Stack(torch.__version__.partition("+")[0], nccl, cumem, nvls)


def read_labels(labels: Mapping[str, str] | None) -> Stack | None:
    """Return the stack from the labels of a server (`Stack.labels`), or None for a server without these labels."""
    values = [(labels or {}).get(f"megappo_{name}") for name in Stack.__dataclass_fields__]
    return Stack(*map(str, values)) if None not in values else None


def group_problem(server: str, theirs: Stack, ours: Stack, *, by_nccl: bool) -> str | None:
    """Return the reason that trainers and this server cannot form a group, with a remedy, or None. Without NCCL only
    the versions of torch must be equal."""
    if theirs.torch != ours.torch or (by_nccl and theirs.nccl != ours.nccl):
        return (
            f"{server} has {theirs.versions}, the trainers have {ours.versions}, and a group that broadcasts weights "
            "needs the same at both ends; install the same versions"
        )
    if by_nccl and theirs.settings != ours.settings:
        return (
            f"{server} was started with {theirs.settings}, the trainers with {ours.settings}, and a group that "
            "broadcasts weights needs the same at both ends; export the same values before starting both"
        )
    return None
