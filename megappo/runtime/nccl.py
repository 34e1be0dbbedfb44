"""What the two ends of a broadcast group must have in common: trainers and servers, which may be on other machines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What SGLang sets in its servers where the user says nothing (its entrypoints/engine.py): a trainer with NCCL's own
defaults would register memory in a way that the other end of a group does not."""


_ON_ERROR, _NOTHING = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"


@contextmanager
def errors_are_the_callers() -> Iterator[None]:
    """Groups that are made inside leave it to who waits for a collective to notice that the other end is gone; torch's
    own watchdog would end this process for it."""
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
    """Decide for the trainers and their servers, before NCCL looks; what the user has set holds for both."""
    for name, value in SETTINGS.items():
        environment.setdefault(name, value)


@dataclass(frozen=True)
class Stack:
    """What one end has."""

    torch: str
    """Its version without the build: 2.14.1."""
    nccl: str
    """Version; empty where torch has no NCCL."""
    cumem: str
    nvls: str
    """NCCL's settings as they are in the environment."""

    @property
    def versions(self) -> str:
        """In words."""
        return f"torch {self.torch} and {f'NCCL {self.nccl}' if self.nccl else 'no NCCL'}"

    @property
    def settings(self) -> str:
        """In words."""
        return f"NCCL_CUMEM_ENABLE={self.cumem} and NCCL_NVLS_ENABLE={self.nvls}"

    def labels(self) -> dict[str, str]:
        """For a server to tell; see `read_labels`."""
        return {f"megappo_{name}": value for name, value in asdict(self).items()}


def own_stack(environment: Mapping[str, str]) -> Stack:
    """That of this process, or of a server that it starts in this environment."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    cumem, nvls = (environment.get(name, default) for name, default in SETTINGS.items())
    return Stack(torch.__version__.partition("+")[0], nccl, cumem, nvls)


def read_labels(labels: Mapping[str, str] | None) -> Stack | None:
    """What `Stack.labels` said; None for a server that says nothing of the kind."""
    values = [(labels or {}).get(f"megappo_{name}") for name in Stack.__dataclass_fields__]
    return Stack(*map(str, values)) if None not in values else None


def group_problem(server: str, theirs: Stack, ours: Stack, *, by_nccl: bool) -> str | None:
    """Why no group of trainers and this server can be trusted, with what to do; None where one can. Without NCCL only
    torch must be the same."""
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
