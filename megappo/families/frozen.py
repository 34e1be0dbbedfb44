"""Frozen parameters of a trained model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import lru_cache

from megappo.families.adapters import LoraShape, adapters
from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import EMBEDDING, Parameter, model_parameters

SHORTCUTS = ("attention", "embeddings")
"""Names that `freeze` may contain in addition to patterns. `attention`: attention layers of all kinds, including
norms of queries and keys, but not layer norms; `embeddings`: the token embedding."""


def _matches(parameter: Parameter, freeze: tuple[str, ...]) -> list[bool]:
    """Return for each Hugging Face tensor of the parameter whether the tensor is frozen."""
    is_named = ("attention" in freeze and ".self_attention." in parameter.megatron) or (
        "embeddings" in freeze and parameter.megatron == EMBEDDING
    )
    return [is_named or any(fnmatchcase(name, pattern) for pattern in freeze) for name in parameter.hf]


@lru_cache(maxsize=64)
def frozen_parameters(
    arch: ArchitectureConfig, freeze: tuple[str, ...], lora: LoraShape | None = None
) -> tuple[Parameter, ...]:
    """Return the parameters that are not trained.

    With `lora` only adapters are trained. The frozen parameters are then the adapters of the frozen matrices.

    Args:
        freeze: names in `SHORTCUTS`, and shell patterns of Hugging Face names. A pattern must match all or none of the
            tensors in one Megatron parameter.
    """
    if not freeze:
        return ()
    if lora is None:
        return tuple(p for p in model_parameters(arch) if all(_matches(p, freeze)))
    return tuple(p for x in adapters(arch, lora) if all(_matches(x.base, freeze)) for p in (x.a, x.b))


def freeze_problems(arch: ArchitectureConfig, freeze: tuple[str, ...], lora: LoraShape | None) -> Iterator[str]:
    """Yield the problems of the patterns for a model, each with a remedy."""
    parameters = list(model_parameters(arch))
    for pattern in (text for text in freeze if text not in SHORTCUTS):
        if not any(fnmatchcase(name, pattern) for p in parameters for name in p.hf):
            yield f"'{pattern}' matches no tensor of a {arch.family}, such as {parameters[1].hf[0]}; correct the name"
    of_experts = defaultdict[tuple[int | None, str], set[bool]](set)
    for parameter in parameters:
        matches = _matches(parameter, freeze)
        if len(set(matches)) > 1:
            frozen, other = (parameter.hf[matches.index(is_frozen)] for is_frozen in (True, False))
            yield f"{frozen} would be frozen and {other} not, but both share a Megatron parameter; freeze both or none"
            return
        if parameter.expert is not None:
            of_experts[parameter.layer, parameter.megatron.rpartition(".experts.")[2].partition(".")[2]] |= set(matches)
    if any(len(matches) > 1 for matches in of_experts.values()):
        yield "some experts of a layer would be frozen and some not; write * instead of their numbers"
        return
    names = {p.megatron for p in frozen_parameters(arch, freeze, lora)}
    trained = parameters if lora is None else [x.a for x in adapters(arch, lora)]
    left = {p.layer for p in trained if p.megatron not in names}
    empty = next((layer for layer in range(arch.layers) if layer not in left), None)
    if empty is not None:
        yield f"all parameters of layer {empty} are frozen; keep at least one of them trainable"
