"""Low-rank adapters (LoRA) of a model's matrices, in Megatron's parameters and under PEFT's names.

Where a Megatron parameter holds several Hugging Face matrices (query, key and value; gate and up), each has its own A
and B, as in PEFT. The A are stacked row-wise, and the B have the rows of the parameter, in its order and on the same
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from megappo.families.architecture import ArchitectureConfig
from megappo.families.parameters import Parameter, model_parameters, pieces

_KINDS = ("column", "row", "qkv")
WEIGHT = ".weight"
A, B = ".lora_A.weight", ".lora_B.weight"
"""Endings that PEFT puts in the place of `.weight`."""


@dataclass(frozen=True)
class LoraShape:
    """Rank, alpha and targets of a model's adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Last parts of the names of the adapted matrices, in the model's order."""

    @property
    def scale(self) -> float:
        """Factor of the product B A that is added to the matrix."""
        return self.alpha / self.rank

    @classmethod
    def of(cls, arch: ArchitectureConfig, rank: int, alpha: float, targets: str | Iterable[str]) -> LoraShape:
        """The shape of an architecture's adapters. `targets`: names, or `all`."""
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
        """Whether each of the base's matrices has an adapter."""
        return tuple(name.removesuffix(WEIGHT) + A in self.a.hf for name in self.base.hf)


@dataclass(frozen=True)
class RowOrder:
    """Order of the matrices' rows in a shard: groups, each with some rows of every matrix."""

    groups: int
    rows: tuple[int, ...]
    """Number of rows of each matrix in a group."""
    adapted: tuple[bool, ...]

    @classmethod
    def of(cls, arch: ArchitectureConfig, adapter: Adapter, tp: int) -> RowOrder:
        """The row order of a parameter, which is the same on every tensor parallel rank."""
        base = adapter.base
        found = pieces(arch, base, 0, tp, arch.vocab_size)
        first = found[: len(base.hf)]
        rows = tuple(piece.size if piece.dim == 0 else base.shapes[0][0] for piece in first)
        return cls(len(found) // len(base.hf), rows, adapter.adapted)


def target_name(matrix: str) -> str:
    """The target that a matrix belongs to: `q_proj` for `model.layers.0.self_attn.q_proj.weight`."""
    return matrix.removesuffix(WEIGHT).rpartition(".")[2]


@lru_cache(maxsize=64)
def target_names(arch: ArchitectureConfig) -> tuple[str, ...]:
    """All names that `targets` may contain, in the model's order."""
    found = (p for p in model_parameters(arch, experts=range(min(1, arch.experts))) if _can_have(p))
    return tuple(dict.fromkeys(target_name(name) for parameter in found for name in parameter.hf))


def least_side(arch: ArchitectureConfig, targets: Iterable[str]) -> int:
    """Smallest side of the matrices of these targets, which no rank may exceed."""
    wanted = set(targets)
    found = (p for p in model_parameters(arch, experts=range(min(1, arch.experts))) if _can_have(p))
    return min(min(s) for p in found for name, s in p.tensors.items() if target_name(name) in wanted)


def ambiguous_targets(arch: ArchitectureConfig, lora: LoraShape) -> tuple[str, ...]:
    """Targets that name both experts' matrices and others. For PEFT a target is one or the other, and it drops the
    experts' adapters without a word."""
    found = list(adapters(arch, lora, experts=range(min(1, arch.experts))))
    of_experts, others = (
        {target_name(name) for x in found if (x.base.expert is None) == is_other for name in x.base.hf}
        for is_other in (False, True)
    )
    return tuple(name for name in lora.targets if name in of_experts & others)


def _can_have(parameter: Parameter) -> bool:
    return parameter.layer is not None and parameter.kind in _KINDS and len(parameter.shapes[0]) == 2


def adapters(arch: ArchitectureConfig, lora: LoraShape, *, experts: Iterable[int] | None = None) -> Iterator[Adapter]:
    """Adapters of every layer, in the model's order. `experts`: only the adapters of these experts."""
    wanted = set(lora.targets)
    for base in model_parameters(arch, experts=experts):
        if _can_have(base):
            tensors = {name: shape for name, shape in base.tensors.items() if target_name(name) in wanted}
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
    """The parameters A and B of all adapters."""
    return chain.from_iterable((adapter.a, adapter.b) for adapter in adapters(arch, lora, experts=experts))


@lru_cache(maxsize=64)
def expert_adapter_parameters(arch: ArchitectureConfig, lora: LoraShape) -> int:
    """Elements of the adapters of one expert in one layer."""
    found = adapter_parameters(arch, lora, experts=range(min(1, arch.experts)))
    return sum(p.elements for p in found if p.layer == arch.layers - 1 and p.expert is not None)


@lru_cache(maxsize=64)
def multiplied_adapters(arch: ArchitectureConfig, lora: LoraShape) -> int:
    """Number of elements of the adapters that a token passes."""
    return sum(p.elements for p in adapter_parameters(arch, lora, experts=range(arch.experts_per_token)))


def adapter_tensors(arch: ArchitectureConfig, lora: LoraShape) -> dict[str, tuple[int, ...]]:
    """Shapes of all of PEFT's tensors by their names."""
    return {name: shape for p in adapter_parameters(arch, lora) for name, shape in p.tensors.items()}


def initial_bound(columns: int) -> float:
    """Bound of the uniform distribution that A is drawn from: PEFT's kaiming_uniform_(a=sqrt(5)), He et al. 2015."""
    return 1 / math.sqrt(columns)
