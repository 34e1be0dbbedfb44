"""Replacement of CUDA in unmodified Megatron-Core 0.16 to 0.19 on a machine without CUDA.

Megatron uses CUDA in places without kernels: `device="cuda"` for a counter, `.cuda()` of an index, the type name of a
gradient buffer, and the generator of a random state. `install()` redirects all of them to the CPU, once per process and
permanently. `install()` raises an error on a machine with CUDA. The module `all_devices` contains the replacements
for GPUs and CPUs.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from megappo.runtime.attributes import replace_attributes, replaced_attributes

_CPU = torch.device("cpu")
_Ignored: TypeAlias = "torch.device | _NoStream | int | str | None"
"""Arguments of streams, events and random states that have no effect on a CPU: a device, another stream or event, or a
flag."""
FACTORIES = ("empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")
"""Functions of torch that Megatron 0.16.1 / 0.19.2 calls with `device="cuda"` or `pin_memory`: schedules.py:596/749
(counters), clip_grads.py:103/108 (norms), optimizer.py:481/315 (found_inf), rope_utils.py:62-64 (indices)."""


class _NoStream:
    """Replacement of Megatron's CUDA streams and events. On a CPU every operation is already in order."""

    def __init__(self, *_args: _Ignored, **_kwargs: _Ignored) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        return None

    def _nothing(self, *_args: _Ignored, **_kwargs: _Ignored) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, *_args: _Ignored, **_kwargs: _Ignored) -> _NoStream:
        """Return a completed event. Megatron's own dispatcher waits for this event (token_dispatcher.py:895). A
        benchmark compares this dispatcher with the dispatcher of megappo."""
        return _NoStream()


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a factory function of torch: `device="cuda"` becomes the CPU, and memory is never pinned."""

    @functools.wraps(factory)
    def made(*args: Any, **options: Any) -> torch.Tensor:
        if "device" in options and str(options["device"]).startswith("cuda"):
            options["device"] = _CPU
        if options.get("pin_memory"):
            options["pin_memory"] = False
        return factory(*args, **options)

    return made


def _type_as_on_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> str | torch.Tensor:
    """Replace `Tensor.type` by the type name that the tensor would have on a GPU. The distributed optimizer compares
    these names (distrib_optimizer.py:361/401)."""
    result: str | torch.Tensor = _tensor_type(tensor, *args, **kwargs)
    # A tensor without memory (FakeTensor) also gets its type from this function.
    return re.sub(r"^torch\.(cuda\.)?", "torch.cuda.", result) if isinstance(result, str) else result


_tensor_type = torch.Tensor.type


def _get_rng_state(*_args: _Ignored, **_kwargs: _Ignored) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_args: _Ignored, **_kwargs: _Ignored) -> None:
    torch.set_rng_state(state)


def _hide_cuda_only_packages() -> None:
    """Hide packages that are installed with an inference server and that Megatron would import.

    flash_mla needs libcuda and raises OSError, which megatron.core does not catch. flashinfer and flash_attn take
    seconds to import. They are for unused inference code and for attention on GPUs.
    """
    for package in ("flash_mla", "flashinfer", "flash_attn"):
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Make the decorator `torch.compile` return functions unchanged within the context, if compilation is disabled.

    Megatron decorates its fusions with `torch.compile` (jit.py:24, moe/router.py:918). torch then imports Dynamo and
    Inductor, which takes two of the ten CPU seconds of the start of a rank.
    """
    if os.environ.get("TORCHDYNAMO_DISABLE", "1") != "1":  # the user has enabled compilation
        yield
        return
    with replaced_attributes(
        torch, compile=lambda function=None, **_options: function if function is not None else lambda f: f
    ):
        yield


@functools.cache
def install() -> None:
    """Replace the parts of `torch.cuda` that Megatron uses. Must be called before `megatron.core` is imported."""
    if torch.cuda.is_available():
        raise RuntimeError("the CPU stand-ins for CUDA must not be installed on a machine that has CUDA")
    _hide_cuda_only_packages()
    # Calls of Megatron that use these functions (0.16.1 / 0.19.2): `current_device` param_and_grad_buffer.py:800/1180,
    # mappings.py:141/145; `synchronize` p2p_communication.py:398/419; streams token_dispatcher.py:445/469; random
    # states random.py:235/303.
    replace_attributes(
        torch.cuda,
        current_device=lambda: _CPU,
        synchronize=lambda *_args, **_kwargs: None,
        get_rng_state=_get_rng_state,
        set_rng_state=_set_rng_state,
        manual_seed=torch.manual_seed,
    )
    for name in ("Stream", "Event", "stream", "current_stream", "default_stream"):
        setattr(torch.cuda, name, type(name, (_NoStream,), {}))  # torch.compile needs a different object for each name
    # isinstance() in module.py:20-22 of 0.16.1 needs classes instead of functions.
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor"):
        setattr(torch.cuda, name, getattr(torch, name))

    with _without_compiler():
        import_module("megatron.core.models.gpt.gpt_layer_specs")  # imports all parts of the models
        import megatron.core.tensor_parallel.random as megatron_random

    _device_constructors()  # torch caches the original functions, with which `with torch.device(...)` compares calls
    replace_attributes(torch, **{name: _on_cpu(getattr(torch, name)) for name in FACTORIES})
    # `.cuda()`: rope_utils.py:64, data.py:84.
    replace_attributes(torch.Tensor, cuda=lambda tensor, *_args, **_kwargs: tensor, type=_type_as_on_cuda)
    # Without both replacements, fork() of the tracker does not switch the generator, and raises no error.
    megatron_random._get_cuda_rng_state, megatron_random._set_cuda_rng_state = _get_rng_state, _set_rng_state


@functools.cache
def gather_one_by_one() -> None:
    """Make the distributed optimizer gather the weights of each bucket separately, for gloo.

    torch's gloo stores the name of a finished collective, and two of its threads write this name without a lock (2.14,
    ProcessGroupGloo.cpp, runLoop). The name of a coalesced gather is too long to be stored inside the string object, so
    both threads free its memory. The process crashes some allocations later. With two concurrent gathers, about 1% of
    the steps crash.
    """
    from megatron.core.distributed import param_and_grad_buffer

    groups = param_and_grad_buffer._ParamAndGradBucketGroup
    coalesced = groups.start_param_sync

    @functools.wraps(coalesced)
    def start_param_sync(*args: Any, **kwargs: Any) -> None:
        with _not_coalesced(param_and_grad_buffer):
            coalesced(*args, **kwargs)

    groups.start_param_sync = start_param_sync


@contextmanager
def _not_coalesced(module: ModuleType) -> Iterator[None]:
    """Make Megatron's `_coalescing_manager` start gathers at once and wait for all of them together, within the
    context."""
    gather, works = module.dist_all_gather_func, _Works()

    def noted(*args: Any, **kwargs: Any) -> None:
        works.append(gather(*args, **kwargs))

    with replaced_attributes(
        module, _coalescing_manager=lambda *_args, **_kwargs: nullcontext(works), dist_all_gather_func=noted
    ):
        yield


class _Works(list[dist.Work]):
    """Collectives with a common wait."""

    def wait(self) -> None:
        for work in self:
            work.wait()
