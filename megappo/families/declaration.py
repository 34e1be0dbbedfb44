"""The declaration of a model family: how its config.json is read, and the blocks that its layers consist of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from megappo.families.architecture import ArchitectureConfig
from megappo.families.fields import Activation, Fields, HFConfig, MegatronSettings
from megappo.families.served import Served, unread_settings
from megappo.observe.json_values import JSONValue

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Shape = tuple[int, ...]
Kind = Literal["replicated", "column", "row", "qkv", "grouped", "vocab"]
"""How tensor parallel ranks divide a parameter. `replicated`: not at all; `column`: the rows of each of its tensors
(Megatron's column parallel layers); `row`: the columns of its one tensor; `qkv`: groups of query, key and value heads;
`grouped`: key heads of linear attention, each with what belongs to it; `vocab`: the padded rows of a vocabulary."""


Drawn = Literal["by_shape", "ones", "rates", "normal"]
"""How a parameter is drawn in a model of random weights. `by_shape`: a norm or a bias that does nothing, or a normal
matrix; `ones`; `rates`: logarithms of numbers between 0.01 and 16; `normal`: normal numbers whatever its shape."""


@dataclass(frozen=True)
class Weight:
    """A parameter of each layer and the Hugging Face tensors it is made of, by their names within the layer.

    With `{expert}` in its names, every expert has one, whole on the ranks that hold the expert.
    """

    megatron: str
    """Canonical name, in the map, in checkpoints and in weight streams: that of Megatron's own layers."""
    tensors: Mapping[str, Shape]
    kind: Kind
    alias: str = ""
    """Name in Transformer Engine's layers, where it differs."""
    fused: str = ""
    """SGLang's parameter that holds all of the tensors, where its name is not that of the only one."""
    packed: str = ""
    """transformers' parameter that holds the tensors, where its name is not that of the only one; for experts, the
    parameter that holds the tensors of all of them."""
    interleaved: bool = False
    """Whether files have the `packed` tensor too, in the place of the tensors: for each expert the transposed matrix,
    inputs by outputs, with the outputs of the tensors alternating."""
    wide: bool = False
    """Whether engines and files have the parameter in float32, whatever the model's type."""
    sections: tuple[tuple[int, ...], ...] = ()
    """Rows of each part of each tensor of a `grouped` parameter; groups divide every part. Empty: a tensor is one
    part."""
    drawn: Drawn = "by_shape"
    """How the parameter is drawn in a model of random weights."""

    @property
    def is_of_experts(self) -> bool:
        """Whether each expert of a layer has such a parameter."""
        return "{expert}" in self.megatron


class PerToken(NamedTuple):
    """Memory and traffic of a block for each token, over all tensor parallel ranks (`megappo.plan.activations`)."""

    kept_bytes: float = 0.0
    """Bytes that forward keeps for backward."""
    live_elements: int = 0
    """Elements that are in memory at once while the block runs."""
    moved_elements: int = 0
    """Elements that a forward pass writes and reads again."""


class Block:
    """A part of layers. A method that a block does not override says that it has nothing, and is in every layer."""

    recompute_module = ""
    """Word of `recompute_modules` by which backward recomputes the whole block."""

    def layers(self, arch: ArchitectureConfig) -> Collection[int]:
        """The layers that have the block."""
        return range(arch.layers)

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        """The parameters of the block."""
        return ()

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        """Fields of Megatron's TransformerConfig that make the block part of the model, without `activation_func`."""
        return {}

    def activation(self, arch: ArchitectureConfig) -> Activation | None:
        """`activation_func` of Megatron's TransformerConfig, where the block says it; apart from `megatron`, whose
        fields plans read without importing torch."""
        return None

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        """Activations that the planner counts for the block, in a type of `element_bytes`; `fused`: a norm or an
        activation is one kernel."""
        return PerToken()


def nothing(c: HFConfig) -> Fields:
    """No fields of config.json."""
    return {}


def no_tensors(arch: ArchitectureConfig) -> tuple[str, ...]:
    """No names of tensors."""
    return ()


def next_token_layers(arch: ArchitectureConfig) -> Sequence[str]:
    """Beginnings of the names of multi-token prediction layers in families that have them behind the other layers."""
    return [f"model.layers.{arch.layers + n}." for n in range(arch.hf_config.num_mtp_layers)]


def without_next_token_layers(c: HFConfig) -> Fields:
    """config.json's entry that tells SGLang of no multi-token prediction layers: a run's servers hold what the actor
    computes."""
    return {"num_mtp_layers": 0}


@dataclass(frozen=True)
class Family:
    """Declaration of a family, from which loading, streaming, checkpoints, export, plans and engines all follow."""

    model_type: str
    """`model_type` of the config.json files that the family reads."""
    reads: tuple[Callable[[HFConfig], Fields], ...]
    """Functions from transformers' configuration to fields of ArchitectureConfig; later ones win. They raise ValueError
    for what the blocks do not build."""
    blocks: tuple[Block, ...]
    """Blocks of the layers. Their order is that of the parameters in buckets and files."""
    attends_in_groups: bool = False
    """Whether SGLang's model supports data parallel attention (`rollout.sglang.data_parallel_attention`)."""
    unserved: Callable[[ArchitectureConfig, Served], str] = unread_settings
    """Why SGLang does not compute such a model, to be read after "SGLang's <family>": "has attention in every n-th
    layer, and ..."; "" where it does."""
    extra_config: Callable[[HFConfig], Mapping[str, JSONValue]] = nothing
    """Entries of config.json, from transformers' configuration, that SGLang reads in addition to what transformers
    writes."""
    mtp_layers: Callable[[ArchitectureConfig], Sequence[str]] = no_tensors
    """Beginnings of the names of layers that predict further tokens (multi-token prediction). No role computes them:
    they stay in the folder of the model, and an export of the policy has them again."""
    mtp_count_field: str = ""
    """Name of config.json's entry with the number of such layers."""
    passed_over: Callable[[ArchitectureConfig], Sequence[str]] = no_tensors
    """Beginnings of names of tensors in files that transformers does not read either."""
    stored_prefix: str = ""
    """Prefix that names in files may have in the place of `model.`, where the model was part of a larger one."""
    within: str = ""
    """`model_type` of larger models with images, in whose folders the language model is read; its configuration is
    their `text_config`."""
    adapted: bool = True
    """Whether adapters of its matrices (`actor.lora`) are those that PEFT would have."""
    fingerprinted: bool = True
    """Whether SGLang keeps its tensors where `fused` says, in their order; otherwise what arrived cannot be compared
    (`rollout.sglang.verify`)."""

    @property
    def may_have_mtp_layers(self) -> bool:
        """Whether models of the family may have multi-token prediction layers."""
        return self.mtp_layers is not no_tensors

    def architecture(self, hf_config: PretrainedConfig) -> ArchitectureConfig:
        """The architecture of a model of this family. Raises ValueError for what the family refuses."""
        c = copy.deepcopy(hf_config)
        fields = {name: value for read in self.reads for name, value in read(c).items()}
        if hasattr(c, "quantization_config"):
            del c.quantization_config
        return ArchitectureConfig(family=self.model_type, hf_config=c, declaration=self, **fields)

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        """Fields of Megatron's TransformerConfig that the family's blocks ask for."""
        functions = [f for block in self.blocks if (f := block.activation(arch)) is not None]
        return self.switches(arch) | ({"activation_func": functions[-1]} if functions else {})

    def switches(self, arch: ArchitectureConfig) -> MegatronSettings:
        """`megatron` without the activation function of MLPs."""
        return {name: value for block in self.blocks for name, value in block.megatron(arch).items()}

    def has_zero_centered_norms(self, arch: ArchitectureConfig) -> bool:
        """Whether norms multiply by 1 plus their weights."""
        return _has_zero_centered_norms(self, arch)

    def norms_in_float32(self, arch: ArchitectureConfig, element_bytes: int) -> bool:
        """Whether norms work on float32 copies where no kernel computes them, as zero-centered ones do."""
        return element_bytes == 4 or self.has_zero_centered_norms(arch)

    def per_token(
        self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool, without: Sequence[str] = ()
    ) -> PerToken:
        """Activations of all blocks of a layer except those that are recomputed (`without`). Where layers differ, the
        larger of the first and the last. Where linear attention or wider heads stand among others, the mean over
        layers, but the maximum of `live_elements`."""
        return _per_token(self, arch, element_bytes, fused, tuple(without))


@lru_cache(maxsize=256)
def _has_zero_centered_norms(family: Family, arch: ArchitectureConfig) -> bool:
    return bool(family.switches(arch).get("layernorm_zero_centered_gamma"))


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
