"""Settings that both ends of a broadcast group must share: trainers and servers, which may be on other machines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Values that SGLang sets in its servers unless the user does (0.5.23, entrypoints/engine.py). A trainer with NCCL's
own defaults would register memory in a way that the other end of a group does not."""


# Read by torch when a group on NCCL is made.
_ON_ERROR, _NOTHING = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"


@contextmanager
def errors_are_the_callers() -> Iterator[None]:
    """Within the context, groups are made without torch's NCCL watchdog, which would end this process when the other
    end of a group dies. The caller that waits for a collective has to notice the loss."""
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
    """Set NCCL's variables for trainers and their servers, before NCCL reads them; the user's own values hold for
    both."""
    for name, value in SETTINGS.items():
        environment.setdefault(name, value)


@dataclass(frozen=True)
class Stack:
    """Versions and NCCL settings of one end of a group."""

    torch: str
    """Version without the build: 2.14.1."""
    nccl: str
    """Version of NCCL; empty where torch has none."""
    cumem: str
    nvls: str
    """Values of NCCL's variables in the environment."""

    @property
    def versions(self) -> str:
        """Sentence part with the versions."""
        return f"torch {self.torch} and {f'NCCL {self.nccl}' if self.nccl else 'no NCCL'}"

    @property
    def settings(self) -> str:
        """Sentence part with the settings."""
        return f"NCCL_CUMEM_ENABLE={self.cumem} and NCCL_NVLS_ENABLE={self.nvls}"

    def labels(self) -> dict[str, str]:
        """Labels with which a server publishes its stack; see `read_labels`."""
        return {f"megappo_{name}": value for name, value in asdict(self).items()}


def own_stack(environment: Mapping[str, str]) -> Stack:
    """Stack of this process, or of a server that it starts in this environment."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    cumem, nvls = (environment.get(name, default) for name, default in SETTINGS.items())
    return Stack(torch.__version__.partition("+")[0], nccl, cumem, nvls)


def read_labels(labels: Mapping[str, str] | None) -> Stack | None:
    """Stack from a server's `Stack.labels`; None for a server without them."""
    values = [(labels or {}).get(f"megappo_{name}") for name in Stack.__dataclass_fields__]
    return Stack(*map(str, values)) if None not in values else None


def group_problem(server: str, theirs: Stack, ours: Stack, *, by_nccl: bool) -> str | None:
    """Why trainers and this server cannot form a group, with a remedy; None where they can. Without NCCL only torch
    must be the same."""
    if theirs.torch != ours.torch or (by_nccl and theirs.nccl != ours.nccl):
        return (
            f"{server} has {theirs.versions}, the trainers have {ours.versions}, and a group that broadcasts weights "
            "wants the same at both ends; install the same versions"
        )
    if by_nccl and theirs.settings != ours.settings:
        return (
            f"{server} was started with {theirs.settings}, the trainers with {ours.settings}, and a group that "
            "broadcasts weights wants the same at both ends; export the same values before starting both"
        )
    return None
