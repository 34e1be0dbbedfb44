"""What a model family is: how its config.json is read, and the blocks that each of its layers is made of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megappo.families.architecture import ArchitectureConfig
from megappo.families.served import Served, unread_settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Shape = tuple[int, ...]
Kind = Literal["replicated", "column", "row", "qkv", "grouped", "vocab"]
"""How tensor parallel ranks share out a parameter: not at all; the rows of each of its tensors (Megatron's column
parallel layers); the columns of its one tensor; groups of query, key and value heads; key heads of linear attention,
each with what belongs to it; the padded rows of a vocabulary."""


Drawn = Literal["by_shape", "ones", "rates", "normal"]
"""By its shape: a norm or a bias that does nothing, or a normal matrix; ones; logarithms of numbers between 0.01 and
16; normal numbers whatever its shape."""


@dataclass(frozen=True)
class Weight:
    """A parameter of each layer and the Hugging Face tensors it is made of, by their names within the layer.

    With `{expert}` in its names it is there for every expert, whole on the ranks that hold the expert.
    """

    megatron: str
    """Its one name in the map, in checkpoints and streams: that in Megatron's own layers."""
    tensors: Mapping[str, Shape]
    kind: Kind
    alias: str = ""
    """Its name in Transformer Engine's layers, where it is another."""
    fused: str = ""
    """SGLang's parameter that holds all of the tensors, where it is not named like the only one."""
    packed: str = ""
    """transformers' parameter that holds the tensors, where it is not named like the only one; of experts, that which
    holds those of all of them."""
    interleaved: bool = False
    """Files have what `packed` names too, in the place of the tensors: of each expert the matrix transposed, inputs by
    outputs, the outputs of the tensors in turns."""
    wide: bool = False
    """Engines and files have it in float32, whatever the model's type."""
    sections: tuple[tuple[int, ...], ...] = ()
    """Of a `grouped` one: the rows of each part of each tensor, all of which groups share out; nothing: a tensor is one
    part."""
    drawn: Drawn = "by_shape"
    """What it is in a model of random weights."""

    @property
    def is_of_experts(self) -> bool:
        """Whether each expert of a layer has a tensor of this kind."""
        return "{expert}" in self.megatron


class PerToken(NamedTuple):
    """What a block takes for each token, over all tensor parallel ranks (`megappo.plan.activations`)."""

    kept_bytes: float = 0.0
    """What forward keeps for backward."""
    live_elements: int = 0
    """There at once while it runs."""
    moved_elements: int = 0
    """Written and read again by a forward pass."""


class Block:
    """A part of layers. A method that a block does not define says: nothing, and of every layer."""

    recompute_module = ""
    """The word of `recompute_modules` by which backward computes all of it again."""

    def layers(self, arch: ArchitectureConfig) -> Collection[int]:
        """The layers that have it."""
        return range(arch.layers)

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        """The parameters of the block."""
        return ()

    def megatron(self, arch: ArchitectureConfig) -> Mapping[str, Any]:
        """Fields of Megatron's TransformerConfig that make it part of the model."""
        return {}

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        """What the planner counts for it, in a type of so many bytes; `fused`: a norm or an
        activation is one kernel."""
        return PerToken()


def nothing(c: Any) -> dict[str, Any]:
    """Of config.json."""
    return {}


def no_tensors(arch: ArchitectureConfig) -> tuple[str, ...]:
    """Of the files."""
    return ()


def next_token_layers(arch: ArchitectureConfig) -> Sequence[str]:
    """Those that predict further tokens stand behind the others."""
    return [f"model.layers.{arch.layers + n}." for n in range(arch.hf_config.num_mtp_layers)]


def without_next_token_layers(c: Any) -> dict[str, Any]:
    """SGLang is told of none: a run's servers hold what the actor computes."""
    return {"num_mtp_layers": 0}


@dataclass(frozen=True)
class Family:
    """The one declaration of a family, which loading, streaming, checkpoints, export, plans and engines walk."""

    model_type: str
    """`model_type` of the config.json files that the family reads."""
    reads: tuple[Callable[[Any], Mapping[str, Any]], ...]
    """Each gives fields of ArchitectureConfig from transformers' configuration, of which later ones win, and raises
    ValueError for what the blocks do not build."""
    blocks: tuple[Block, ...]
    """Of the layers. Their order is that of the parameters in buckets and files."""
    attends_in_groups: bool = False
    """Whether groups of a server's ranks may attend apart in SGLang's model (`rollout.sglang.data_parallel_attention`).
    """
    unserved: Callable[[ArchitectureConfig, Served], str] = unread_settings
    """Why SGLang does not compute such a model; nothing where it does."""
    further: Callable[[Any], Mapping[str, Any]] = nothing
    """Of transformers' configuration: what SGLang reads of config.json beside what transformers writes."""
    further_layers: Callable[[ArchitectureConfig], Sequence[str]] = no_tensors
    """How names begin of tensors of layers that predict further tokens (multi-token prediction). No role computes them:
    they stay in the folder of the model, and an export of the policy has them again."""
    further_count: str = ""
    """Where config.json says how many such layers there are."""
    passed_over: Callable[[ArchitectureConfig], Sequence[str]] = no_tensors
    """How names begin of tensors in files that transformers does not read either."""
    stored_prefix: str = ""
    """What names in files may begin with in the place of `model.`, where the model was part of a larger one."""
    within: str = ""
    """`model_type` of larger models, which see images too, in whose folders the language model is read: its
    configuration is what stands at `text_config`."""
    adapted: bool = True
    """Adapters of its matrices (`actor.lora`) are those that PEFT would have."""
    fingerprinted: bool = True
    """SGLang keeps its tensors where `fused` says, in their order; otherwise what arrived cannot be compared
    (`rollout.sglang.verify`)."""

    @property
    def may_have_further_layers(self) -> bool:
        """Whether models of the family have any."""
        return self.further_layers is not no_tensors

    def architecture(self, hf_config: PretrainedConfig) -> ArchitectureConfig:
        """The architecture of a model of this family. Raises ValueError for what it refuses."""
        c = copy.deepcopy(hf_config)
        fields = {name: value for read in self.reads for name, value in read(c).items()}
        if hasattr(c, "quantization_config"):
            del c.quantization_config
        return ArchitectureConfig(family=self.model_type, hf_config=c, declaration=self, **fields)

    def megatron(self, arch: ArchitectureConfig) -> dict[str, Any]:
        """Fields of Megatron's TransformerConfig that its blocks ask for."""
        return {name: value for block in self.blocks for name, value in block.megatron(arch).items()}

    def has_zero_centered_norms(self, arch: ArchitectureConfig) -> bool:
        """Whether norms multiply by 1 more than their weights."""
        return _has_zero_centered_norms(self, arch)

    def norms_in_float32(self, arch: ArchitectureConfig, element_bytes: int) -> bool:
        """Whether they work on copies in float32 where no kernel does it, as those whose weights are around zero do."""
        return element_bytes == 4 or self.has_zero_centered_norms(arch)

    def per_token(
        self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool, without: Sequence[str] = ()
    ) -> PerToken:
        """Of all blocks of a layer but those that are recomputed by these modules; where layers differ, the most of
        the first and the last. Where linear attention or wider heads stand among others, their mean, but for what is
        there at once."""
        return _per_token(self, arch, element_bytes, fused, tuple(without))


@lru_cache(maxsize=256)
def _has_zero_centered_norms(family: Family, arch: ArchitectureConfig) -> bool:
    return bool(family.megatron(arch).get("layernorm_zero_centered_gamma"))


@lru_cache(maxsize=256)
def _per_token(
    family: Family, arch: ArchitectureConfig, element_bytes: int, fused: bool, without: tuple[str, ...]
) -> PerToken:
    blocks = [block for block in family.blocks if block.recompute_module not in without]
    of_layers = []
    is_mixed = arch.delta_net is not None or arch.wide_attention is not None
    for layer in range(arch.layers) if is_mixed else {0, arch.layers - 1}:
        here = [block for block in blocks if layer in block.layers(arch)]
        found = [block.per_token(arch, element_bytes, fused=fused) for block in here]
        of_layers.append(PerToken(*map(sum, zip(*found, strict=True))) if found else PerToken())
    most = PerToken(*map(max, zip(*of_layers, strict=True)))
    if not is_mixed:
        return most
    kept, _, moved = (sum(of_kind) / arch.layers for of_kind in zip(*of_layers, strict=True))
    return PerToken(kept, most.live_elements, round(moved))
