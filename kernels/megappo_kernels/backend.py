"""Chooses the implementation: Triton kernels on CUDA, plain torch everywhere else and for float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["torch", "triton"]

_forced: ContextVar[Backend | None] = ContextVar("forced_backend", default=None)


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Force one implementation whatever the device; Triton on a CPU needs TRITON_INTERPRET=1 before its first import.

    Backward uses the same one as its forward. float64 is always computed by torch.
    """
    if name not in ("torch", "triton"):
        raise ValueError(f"'{name}' is not a backend; choose torch or triton")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def runs_triton(tensor: Tensor) -> bool:
    """Whether a call with this tensor uses the Triton kernels."""
    if tensor.dtype == torch.float64:
        return False
    forced = _forced.get()
    return tensor.is_cuda if forced is None else forced == "triton"
