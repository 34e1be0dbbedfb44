"""Declaration of a model family: the functions that read config.json, and the blocks of the layers. The result is the
architecture of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from megappo.families.architecture import STANDARD, ArchitectureExtensions, ModelShape
from megappo.families.fields import Activation, Fields, HFConfig, MegatronSettings
from megappo.families.served import Served, unread_settings
from megappo.files.json_values import JSONValue

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Shape = tuple[int, ...]
Kind = Literal["replicated", "column", "row", "qkv", "grouped", "vocab"]
"""Split of a parameter over tensor parallel ranks. `replicated`: no split; `column`: by rows of each tensor
(Megatron's column parallel layers); `row`: by columns of the only tensor; `qkv`: by groups of query, key and value
heads; `grouped`: by key heads of linear attention with their other channels; `vocab`: by rows of the padded
vocabulary."""


Drawn = Literal["by_shape", "ones", "rates", "normal"]
"""Distribution of a parameter in a randomly initialised model. `by_shape`: normal for matrices, and the neutral
value for norms and biases; `ones`: all ones; `rates`: logarithms of numbers from 0.01 to 16; `normal`: normal for
every shape."""


@dataclass(frozen=True)
class Weight:
    """Parameter of each layer and its Hugging Face tensors, by their names within the layer.

    A name with `{expert}` declares one parameter for each expert. The ranks of an expert store its parameters whole.
    """

    megatron: str
    """Name in Megatron's own layers. The parameter map, checkpoints and weight streams use this name."""
    tensors: Mapping[str, Shape]
    kind: Kind
    alias: str = ""
    """Name in Transformer Engine's layers, if different."""
    fused: str = ""
    """SGLang's parameter that contains all of the tensors, if its name differs from the name of the only tensor."""
    packed: str = ""
    """transformers' parameter that contains the tensors, if its name differs from the name of the only tensor. For
    experts, the parameter that contains the tensors of all experts."""
    interleaved: bool = False
    """Whether files contain the `packed` tensor instead of the tensors. The packed tensor contains a transposed
    matrix (inputs, outputs) for each expert. Outputs of the tensors alternate in this matrix."""
    wide: bool = False
    """Whether engines and files store the parameter in float32 for every `model.dtype`."""
    sections: tuple[tuple[int, ...], ...] = ()
    """Rows of each part of each tensor of a `grouped` parameter. Key heads divide every part. Empty: each tensor is
    one part."""
    drawn: Drawn = "by_shape"
    """Distribution of the parameter in a randomly initialised model."""

    @property
    def is_of_experts(self) -> bool:
        """Whether the layer has one such parameter for each expert."""
        return "{expert}" in self.megatron


class PerToken(NamedTuple):
    """Memory and traffic of a block per token, over all tensor parallel ranks (`megappo.plan.bytes.activations`)."""

    activation_bytes: float = 0.0
    """Bytes that forward stores for backward."""
    live_elements: int = 0
    """Elements in memory at the same time while the block runs."""
    moved_elements: int = 0
    """Elements that a forward pass writes and later reads."""


class Block:
    """Part of the layers of a model. By default a block is part of every layer and has no parameters, settings or
    activations."""

    recompute_module = ""
    """Value of `recompute_modules` that recomputes the whole block in backward."""

    def layers(self, arch: ArchitectureConfig) -> Collection[int]:
        """Return the layers with this block."""
        return range(arch.layers)

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        """Return the parameters of the block."""
        return ()

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        """Return the fields of Megatron's TransformerConfig for this block, except `activation_func`."""
        return {}

    def activation(self, arch: ArchitectureConfig) -> Activation | None:
        """Return `activation_func` of Megatron's TransformerConfig, or None if the block does not set it.

        The activation is not part of `megatron`, because plans read these fields without importing torch.
        """
        return None

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        """Return the activations of the block for the planner.

        Args:
            element_bytes: bytes of an element of the activations.
            fused: whether norms and activations are single kernels.
        """
        return PerToken()


def nothing(c: HFConfig) -> Fields:
    """Return no fields of config.json."""
    return {}


def no_tensors(arch: ArchitectureConfig) -> tuple[str, ...]:
    """Return no names of tensors."""
    return ()


def next_token_layers(arch: ArchitectureConfig) -> Sequence[str]:
    """Return the name prefixes of multi-token prediction layers, for families that number them after the last layer."""
    return [f"model.layers.{arch.layers + n}." for n in range(arch.hf_config.num_mtp_layers)]


def without_next_token_layers(c: HFConfig) -> Fields:
    """Return the entry of config.json that disables multi-token prediction layers in SGLang. Servers of a run load
    only the layers of the actor."""
    return {"num_mtp_layers": 0}


@dataclass(frozen=True)
class ArchitectureConfig(ModelShape):
    """Architecture of a decoder, as its family reads `config.json`."""

    norm_eps: float
    initializer_range: float
    hf_config: PretrainedConfig = field(repr=False, compare=False)
    """transformers' configuration without `quantization_config`, which describes only the stored files."""
    declaration: Family = field(repr=False, compare=False)
    """Declaration of the family, from which the model is built."""
    sliding_window: int | None = None
    """Size of the attention window in tokens, including the token itself. None: no window."""
    windowed_layers: tuple[bool, ...] = ()
    """Whether each layer has the window. Empty: all layers have the window."""
    score_width: int | None = None
    """Width in the scale of attention scores: scores are divided by its square root. None: the head size."""
    extensions: ArchitectureExtensions = STANDARD
    experts_per_token: int = 0
    """Number of experts per token. 0: a dense model."""
    normalized_experts: bool = True
    """Whether the weights of a token's experts sum to 1 (`norm_topk_prob`)."""
    sigmoid_router: bool = False
    """Whether the router selects experts by the sigmoids of the logits plus a correction bias. The weights of
    experts are the sigmoids without the bias."""
    experts_scale: float = 1.0
    """Factor on the sum of the outputs of a token's experts."""
    expert_groups: int = 1
    """Number of groups of consecutive experts, all of the same size. A token first selects groups, by the sum of the
    two largest scores in each group."""
    groups_per_token: int = 1
    """Number of selected groups per token."""
    rotary_channels: int | None = None
    """Number of rotated channels of a head, starting at the first channel. None: all channels."""
    stored_blocks: tuple[int, int] | None = field(default=None, compare=False)
    """Rows and columns of a block with one scale, if files contain float8 weights. None: plain weights."""
    stored_mxfp4: bool = field(default=False, compare=False)
    """Whether files may contain the matrices of experts in MXFP4."""

    @property
    def has_window(self) -> bool:
        """Whether some layers have an attention window."""
        return self.sliding_window is not None

    @property
    def is_standard(self) -> bool:
        """Whether the arguments of Megatron-LM can describe the model."""
        special = self.sigmoid_router or self.latent is not None or self.special_layers != ()
        return not special and self.extensions == STANDARD


@dataclass(frozen=True)
class Family:
    """Declaration of a family. Loading, streaming, checkpoints, export, plans and engines use this declaration."""

    model_type: str
    """`model_type` of the supported config.json files."""
    reads: tuple[Callable[[HFConfig], Fields], ...]
    """Functions from transformers' configuration to fields of ArchitectureConfig. Later functions override fields of
    earlier ones. Functions raise ValueError for settings that the blocks do not support."""
    blocks: tuple[Block, ...]
    """Blocks of the layers, in the order of their parameters in buckets and files."""
    attends_in_groups: bool = False
    """Whether SGLang's model supports data parallel attention (`rollout.servers.data_parallel_attention`)."""
    unserved: Callable[[ArchitectureConfig, Served], str] = unread_settings
    """Function that returns why SGLang computes such a model differently, or "" if the results are equal. The text
    follows "SGLang's <family>", such as "expects attention in every n-th layer, but ..."."""
    extra_config: Callable[[HFConfig], Mapping[str, JSONValue]] = nothing
    """Entries of config.json for SGLang, in addition to the entries that transformers writes. The argument is
    transformers' configuration."""
    mtp_layers: Callable[[ArchitectureConfig], Sequence[str]] = no_tensors
    """Name prefixes of multi-token prediction layers. No role computes these layers. Exports of the policy copy the
    layers from the folder of the model."""
    mtp_count_field: str = ""
    """Entry of config.json with the number of multi-token prediction layers."""
    passed_over: Callable[[ArchitectureConfig], Sequence[str]] = no_tensors
    """Name prefixes of tensors in files that transformers ignores."""
    stored_prefix: str = ""
    """Prefix in files that replaces `model.`, if the model was part of a larger model."""
    within: str = ""
    """`model_type` of a larger model with images. From its folders, only the language model is read, with
    `text_config` as configuration."""
    adapted: bool = True
    """Whether the family supports adapters (`actor.lora`) that are equal to PEFT's adapters."""
    fingerprinted: bool = True
    """Whether SGLang stores the tensors in the parameters and the order of `fused`. If false, received weights
    cannot be compared (`rollout.servers.verify`)."""

    @property
    def may_have_mtp_layers(self) -> bool:
        """Whether models of the family may have multi-token prediction layers."""
        return self.mtp_layers is not no_tensors

    def architecture(self, hf_config: PretrainedConfig) -> ArchitectureConfig:
        """Return the architecture of a model of this family. Raises ValueError for settings that the family refuses."""
        c = copy.deepcopy(hf_config)
        fields = {name: value for read in self.reads for name, value in read(c).items()}
        if hasattr(c, "quantization_config"):
            del c.quantization_config
        return ArchitectureConfig(family=self.model_type, hf_config=c, declaration=self, **fields)

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        """Return the fields of Megatron's TransformerConfig for the blocks of the family."""
        functions = [f for block in self.blocks if (f := block.activation(arch)) is not None]
        return self.switches(arch) | ({"activation_func": functions[-1]} if functions else {})

    def switches(self, arch: ArchitectureConfig) -> MegatronSettings:
        """Return the fields of `megatron` without the activation function of MLPs."""
        return {name: value for block in self.blocks for name, value in block.megatron(arch).items()}

    def has_zero_centered_norms(self, arch: ArchitectureConfig) -> bool:
        """Return whether norms multiply by 1 plus their weights."""
        return _has_zero_centered_norms(self, arch)

    def norms_in_float32(self, arch: ArchitectureConfig, element_bytes: int) -> bool:
        """Return whether norms without a kernel use float32 copies. Zero-centered norms always do."""
        return element_bytes == 4 or self.has_zero_centered_norms(arch)

    def per_token(
        self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool, without: Sequence[str] = ()
    ) -> PerToken:
        """Return the activations of all blocks of a layer, except the recomputed blocks (`without`).

        If layers differ, each number is the maximum of the first and the last layer. In models with linear or wide
        attention, the result is the mean over all layers, except `live_elements`, which is the maximum.
        """
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
        present = [block for block in blocks if layer in block.layers(arch)]
        costs = [block.per_token(arch, element_bytes, fused=fused) for block in present]
        of_layers.append(PerToken(*map(sum, zip(*costs, strict=True))) if costs else PerToken())
    most = PerToken(*map(max, zip(*of_layers, strict=True)))
    if not is_mixed:
        return most
    stored_mean, _, moved_mean = (sum(of_kind) / arch.layers for of_kind in zip(*of_layers, strict=True))
    return PerToken(stored_mean, most.live_elements, round(moved_mean))
