"""Features without a setting in the GPT model of Megatron-Core, which are added to its layers or around them (see
`families.architecture.ArchitectureExtensions`).

Two features are in other modules: caps and sinks of attention scores are in `attention`, and the cap of logits is in
`heads`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from megappo.families.architecture import ArchitectureExtensions
from megappo.families.declaration import ArchitectureConfig
from megappo.families.rope import rope_kinds
from megappo.megatron.layers.attention import PackedCoreAttention, RMSNorm
from megappo.megatron.layers.swiglu import mlp_submodules

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer


class NormedRowParallel(RowParallelLinear):
    """Row parallel layer with a norm of its complete sums. With sequence parallelism, the norm applies to the tokens
    of the rank.

    The norm is a forward hook, so that an adapter adds to the product before the norm (see `lora`).
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **of_megatron: Any) -> None:
        super().__init__(input_size, output_size, config=config, **of_megatron)
        self.norm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)
        self.register_forward_hook(_normed)


def core_attention(extensions: ArchitectureExtensions) -> ModuleSpec:
    """Return the spec of `PackedCoreAttention` with the model's cap of attention scores and its sinks."""
    return ModuleSpec(PackedCoreAttention, params={"scores_cap": extensions.scores_cap, "has_sinks": extensions.sinks})


def norms_after(layer: ModuleSpec) -> None:
    """Add norms after attention and after the MLP to the spec of a dense layer."""
    layer.submodules.self_attention.submodules.linear_proj = NormedRowParallel
    mlp_submodules(layer).linear_fc2 = NormedRowParallel


def around_layers(model: GPTModel, arch: ArchitectureConfig) -> None:
    """Scale the outputs of the embedding and of each layer, and set the kind of rope of each layer."""
    if model.pre_process and arch.extensions.embedding_scale != 1:
        model.embedding.register_forward_hook(partial(_scaled, arch.extensions.embedding_scale))
    kinds = rope_kinds(arch)
    if len(kinds) > 1:
        for layer in model.decoder.layers:
            number = kinds.index(arch.extensions.ropes[layer.layer_number - 1])
            rope = partial(model.rotary_pos_emb.of_kind, number)
            layer.register_forward_pre_hook(partial(_with_rope, rope), with_kwargs=True)
    if arch.extensions.layer_scalars:
        for layer in model.decoder.layers:
            scalar = torch.ones(1, dtype=layer.config.params_dtype, device=layer.input_layernorm.weight.device)
            layer.layer_scalar = nn.Parameter(scalar, requires_grad=False)
            layer.register_forward_hook(_times_scalar)


def _normed(
    layer: NormedRowParallel, _inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    product, bias = output  # there is no bias
    return layer.norm(product), bias


def _scaled(scale: float, _embedding: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output * output.new_full((), scale)  # rounded to the type of the embedding, as in transformers


def _with_rope(
    rope: Callable[[Tensor], Tensor], _layer: nn.Module, inputs: tuple[Tensor, ...], options: Mapping[str, Any]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Select the layer's kind of rope from the cosines and sines of all kinds."""
    return inputs, {**options, "rotary_pos_emb": rope(options["rotary_pos_emb"])}


def _times_scalar(
    layer: TransformerLayer, _inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    hidden, context = output
    scaled: Tensor = hidden * layer.layer_scalar
    return scaled, context
