"""Lets stock Megatron-Core 0.16 to 0.19 run on a machine without CUDA.

Megatron names CUDA in places that have nothing to do with kernels: `device="cuda"` for a counter, `.cuda()` on an
index, the type name of a gradient buffer, the generator of a random state. Two things answer for them here:
`install()` fills in attributes of `torch.cuda` once per process, and `cuda_means_cpu()` is a torch-function mode that
redirects what can only be seen at the call. Nothing is changed where CUDA exists: `install()` refuses to run there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _NoStream:
    """Stands where Megatron makes a CUDA stream or event; on a CPU every operation is already in order."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = record_event = _nothing


class cuda_means_cpu(TorchFunctionMode):
    """While active, `device="cuda"`, `.cuda()`, `pin_memory` and the names of CUDA tensor types mean the CPU.

    Needed by Megatron 0.16.1 / 0.19.2: schedules.py:596/749 (counters), clip_grads.py:103/108 (norms),
    optimizer.py:481/315 (found_inf), rope_utils.py:62-64 (indices), distrib_optimizer.py:361/401 (type names).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        options = dict(kwargs) if kwargs else {}
        if options.get("device") is not None and str(options["device"]).startswith("cuda"):
            options["device"] = _CPU
        if options.get("pin_memory"):
            options["pin_memory"] = False
        result = func(*args, **options)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _get_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.set_rng_state(state)


def hide_cuda_only_packages() -> None:
    """Importing flash_mla needs libcuda and dies with OSError, which megatron.core does not guard against."""
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]


@functools.cache
def install() -> None:
    """Fill in what Megatron reads from `torch.cuda`; must come before `megatron.core` is imported."""
    if torch.cuda.is_available():
        raise RuntimeError("the CPU stand-ins for CUDA must not be installed on a machine that has CUDA")
    hide_cuda_only_packages()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *_args, **_kwargs: None
    for name in ("Stream", "Event", "stream", "current_stream", "default_stream"):
        setattr(cuda, name, type(name, (_NoStream,), {}))  # torch.compile wants each to be an object of its own
    cuda.get_rng_state, cuda.set_rng_state = _get_rng_state, _set_rng_state
    cuda.manual_seed = torch.manual_seed
    # isinstance() of 0.16.1's module.py:20-22 needs classes here, not functions.
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor"):
        setattr(cuda, name, getattr(torch, name))

    import megatron.core.tensor_parallel.random as megatron_random

    # Without these two nothing raises, but the tracker's fork() neither switches nor restores the generator.
    module: Any = megatron_random
    module._get_cuda_rng_state, module._set_cuda_rng_state = _get_rng_state, _set_rng_state
