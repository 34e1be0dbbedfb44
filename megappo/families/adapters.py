"""Low-rank adapters (LoRA) of a model's matrices: Megatron parameters with PEFT's names.

A Megatron parameter may contain several Hugging Face matrices (query, key and value; gate and up). Each of these
matrices has a separate A and B, as in PEFT. The A matrices are stacked by rows. The rows of the B matrices have the
same order and the same ranks as the rows of the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import Parameter, model_parameters, pieces

_KINDS = ("column", "row", "qkv")
WEIGHT = ".weight"
A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of PEFT's names, which replace `.weight`."""


@dataclass(frozen=True)
class LoraShape:
    """Rank, alpha and targets of a model's adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Last name components of the adapted matrices, in the model's order."""

    @property
    def scale(self) -> float:
        """Factor of the product B A, which is added to the matrix."""
        return self.alpha / self.rank

    @classmethod
    def of(cls, arch: ArchitectureConfig, rank: int, alpha: float, targets: str | Iterable[str]) -> LoraShape:
        """Return the shape of an architecture's adapters. `targets`: names, or `all`."""
        possible = target_names(arch)
        return cls(rank, alpha, possible if targets == "all" else tuple(n for n in possible if n in tuple(targets)))


@dataclass(frozen=True)
class Adapter:
    """Adapters of the matrices in one Megatron parameter."""

    base: Parameter
    a: Parameter
    b: Parameter

    @property
    def adapted(self) -> tuple[bool, ...]:
        """Whether each matrix of the base parameter has an adapter."""
        return tuple(name.removesuffix(WEIGHT) + A in self.a.hf for name in self.base.hf)


@dataclass(frozen=True)
class RowOrder:
    """Order of the rows of several matrices in a shard. Each group contains some rows of every matrix."""

    groups: int
    rows: tuple[int, ...]
    """Number of rows of each matrix in a group."""
    adapted: tuple[bool, ...]

    @classmethod
    def of(cls, arch: ArchitectureConfig, adapter: Adapter, tp: int) -> RowOrder:
        """Return the row order of a parameter, which is the same on all tensor parallel ranks."""
        base = adapter.base
        slices = pieces(arch, base, 0, tp, arch.vocab_size)
        first = slices[: len(base.hf)]
        rows = tuple(piece.size if piece.dim == 0 else base.shapes[0][0] for piece in first)
        return cls(len(slices) // len(base.hf), rows, adapter.adapted)


def target_name(matrix: str) -> str:
    """Return the target of a matrix: `q_proj` for `model.layers.0.self_attn.q_proj.weight`."""
    return matrix.removesuffix(WEIGHT).rpartition(".")[2]


@lru_cache(maxsize=64)
def target_names(arch: ArchitectureConfig) -> tuple[str, ...]:
    """Return all names that `targets` may contain, in the model's order."""
    adaptable = (p for p in model_parameters(arch, experts=range(min(1, arch.experts))) if _can_have(p))
    return tuple(dict.fromkeys(target_name(name) for parameter in adaptable for name in parameter.hf))


def least_side(arch: ArchitectureConfig, targets: Iterable[str]) -> int:
    """Return the smallest dimension of the matrices of these targets. The rank must not exceed this number."""
    target_set = set(targets)
    adaptable = (p for p in model_parameters(arch, experts=range(min(1, arch.experts))) if _can_have(p))
    return min(min(s) for p in adaptable for name, s in p.tensors.items() if target_name(name) in target_set)


def ambiguous_targets(arch: ArchitectureConfig, lora: LoraShape) -> tuple[str, ...]:
    """Return the targets that match matrices of experts and other matrices.

    PEFT applies a target to only one of these kinds, and silently ignores the adapters of experts.
    """
    first_adapters = list(adapters(arch, lora, experts=range(min(1, arch.experts))))
    of_experts, others = (
        {target_name(name) for x in first_adapters if (x.base.expert is None) == is_other for name in x.base.hf}
        for is_other in (False, True)
    )
    return tuple(name for name in lora.targets if name in of_experts & others)


def _can_have(parameter: Parameter) -> bool:
    return parameter.layer is not None and parameter.kind in _KINDS and len(parameter.shapes[0]) == 2


def adapters(arch: ArchitectureConfig, lora: LoraShape, *, experts: Iterable[int] | None = None) -> Iterator[Adapter]:
    """Yield the adapters of every layer, in the model's order. `experts`: yield adapters of these experts only."""
    targets = set(lora.targets)
    for base in model_parameters(arch, experts=experts):
        if _can_have(base):
            tensors = {name: shape for name, shape in base.tensors.items() if target_name(name) in targets}
            if tensors:
                yield _adapter(base, tensors, lora.rank)


def _adapter(base: Parameter, tensors: dict[str, tuple[int, ...]], rank: int) -> Adapter:
    head, _, last = base.megatron.rpartition(".")
    place = f"{head}.{last.replace('weight', 'lora')}"
    names = [name.removesuffix(WEIGHT) for name in tensors]
    outs, ins = ([shape[dim] for shape in tensors.values()] for dim in (0, 1))
    of_rows = base.kind == "row"
    a = Parameter(
        f"{place}.a", tuple(name + A for name in names), tuple((rank, size) for size in ins),
        "row" if of_rows else "replicated", layer=base.layer, expert=base.expert,
    )  # fmt: skip
    b = Parameter(
        f"{place}.b", tuple(name + B for name in names), tuple((size, rank) for size in outs),
        "replicated" if of_rows else base.kind, layer=base.layer, expert=base.expert,
        fused=base.engine_name.removesuffix(WEIGHT) + B if base.kind == "qkv" else "",
    )  # fmt: skip
    return Adapter(base, a, b)


def adapter_parameters(
    arch: ArchitectureConfig, lora: LoraShape, *, experts: Iterable[int] | None = None
) -> Iterator[Parameter]:
    """Yield the parameters A and B of all adapters."""
    return chain.from_iterable((adapter.a, adapter.b) for adapter in adapters(arch, lora, experts=experts))


@lru_cache(maxsize=64)
def expert_adapter_parameters(arch: ArchitectureConfig, lora: LoraShape) -> int:
    """Return the number of adapter elements of one expert in one layer."""
    parameters = adapter_parameters(arch, lora, experts=range(min(1, arch.experts)))
    return sum(p.elements for p in parameters if p.layer == arch.layers - 1 and p.expert is not None)


@lru_cache(maxsize=64)
def multiplied_adapters(arch: ArchitectureConfig, lora: LoraShape) -> int:
    """Return the number of adapter elements that are multiplied with each token."""
    return sum(p.elements for p in adapter_parameters(arch, lora, experts=range(arch.experts_per_token)))


def adapter_tensors(arch: ArchitectureConfig, lora: LoraShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all PEFT tensors by name."""
    return {name: shape for p in adapter_parameters(arch, lora) for name, shape in p.tensors.items()}


def initial_bound(columns: int) -> float:
    """Return the bound of the uniform distribution of A: PEFT's kaiming_uniform_(a=sqrt(5)), He et al. 2015."""
    return 1 / math.sqrt(columns)
