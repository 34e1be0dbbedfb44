"""Triton kernel for an objective: the formula with its slopes and the sums of its metrics, in one launch and a
second sum.

The formulas are compiled from the source in `objectives`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megappo_kernels.objectives import Objective, metric_kind

# With 512 tokens per program, ptxas spills 8 bytes for some combinations of switches on sm_80 and sm_100.
BLOCK, WARPS = 256, 4


_IN_ANNOTATIONS = ("Numbers", "LossSettings", "PolicySettings", "ValueSettings", "Contribution")
"""Names in the annotations of formulas. Triton resolves these names."""
_in_triton: dict[FunctionType, triton.JITFunction] = {}


def in_triton(function: Any) -> triton.JITFunction:
    """Return a function of `objectives` in Triton's language, including the functions that it calls."""
    if function in _in_triton:
        return _in_triton[function]
    scope = {**function.__globals__, "xp": tl, **dict.fromkeys(_IN_ANNOTATIONS, tl.tensor)}
    compiled = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    compiled.__module__, compiled.__qualname__ = function.__module__, function.__qualname__
    _in_triton[function] = triton.jit(compiled)
    for name in function.__code__.co_names:
        value = scope.get(name)
        if isinstance(value, FunctionType):
            scope[name] = in_triton(value)
        elif isinstance(value, float):
            scope[name] = tl.constexpr(value)
    return _in_triton[function]


@triton.jit
def load_valid(pointer, offsets, valid):
    """Load float32 values. Masked positions are 0 for any stored value."""
    return tl.load(pointer + offsets, mask=valid, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["mask"])
def objective_kernel(
    numbers,
    mask,
    slopes,
    partials,
    n,
    settings,
    FORMULA: tl.constexpr,
    KINDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute partials[program, 1 + 2 * metrics]: the number of valid tokens, then two numbers per metric, depending
    on its kind."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    valid = tl.load(mask + offsets, mask=inside, other=0) != 0
    count = tl.sum(valid.to(tl.float32), 0)
    # Missing numbers remain None in this loop, because functions of Triton 3.6 cannot return None.
    values = [p if p is None else load_valid(p, offsets, valid) for p in numbers]
    slope_values, metrics = FORMULA(settings, *values)
    for i in tl.static_range(len(slopes)):
        tl.store(slopes[i] + offsets, slope_values[i], mask=inside)
    partials += tl.program_id(0) * (1 + 2 * len(KINDS))
    tl.store(partials, count)
    for i in tl.static_range(len(KINDS)):
        x = tl.where(valid, metrics[i].to(tl.float32), 0.0)
        place = partials + 1 + 2 * i
        if KINDS[i] == "largest":
            tl.store(place, tl.max(x, 0))
        elif KINDS[i] == "spread":
            mean = tl.sum(x, 0) / tl.maximum(count, 1.0)
            deviation = tl.where(valid, x - mean, 0.0)
            tl.store(place, mean)
            tl.store(place + 1, tl.sum(deviation * deviation, 0))
        else:
            tl.store(place, tl.sum(x, 0))


def aligned(x: Tensor) -> Tensor:
    """Return a contiguous tensor that is aligned to 16 bytes. The tensor is copied if necessary, because pointers in
    a tuple cannot be excluded from specialisation."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def compiled_settings(settings: NamedTuple) -> NamedTuple:
    """Return the settings of an objective with its functions in Triton's language."""
    return type(settings)(*(in_triton(x) if callable(x) else x for x in settings))


def constants_of(objective: Objective | type[Objective]) -> dict[str, Any]:
    """Return the compile-time constants of the kernel, except settings and missing numbers."""
    kinds = tuple(metric_kind(name) for name in objective.metrics)
    return {"FORMULA": in_triton(objective.formula), "KINDS": kinds, "BLOCK": BLOCK}


def launch_objective(
    objective: Objective, numbers: Mapping[str, Tensor | None], mask: Tensor
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the slopes in the trained numbers, and the float64 metrics of each program by name.

    `numbers`: inputs of the formula, in its order.
    """
    like = numbers[objective.trained[0]]
    assert like is not None
    slopes = tuple(torch.empty_like(like, memory_format=torch.contiguous_format) for _ in objective.trained)
    programs = max(1, triton.cdiv(like.numel(), BLOCK))
    partials = torch.zeros(programs, 1 + 2 * len(objective.metrics), dtype=torch.float32, device=like.device)
    objective_kernel[(programs,)](
        tuple(x if x is None else aligned(x) for x in numbers.values()),
        mask.contiguous().view(torch.uint8),
        slopes,
        partials,
        like.numel(),
        compiled_settings(objective.settings()),
        **constants_of(objective),
        num_warps=WARPS,
    )
    columns = partials.double().T
    parts = {"count": columns[0]}
    for name, (first, second) in zip(objective.metrics, columns[1:].unflatten(0, (-1, 2)), strict=True):
        if metric_kind(name) == "spread":
            parts |= {f"{name}.mean": first, f"{name}.m2": second}
        else:
            parts[name] = first
    return slopes, parts
