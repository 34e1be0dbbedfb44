"""Construction of Megatron-Core GPT models from a Hugging Face architecture and a layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from megappo.config.pipeline import even_layers
from megappo.config.sections.roles import OffloadSettings
from megappo.errors import RunError
from megappo.families.adapters import LoraShape, RowOrder, adapter_parameters, adapters
from megappo.families.declaration import ArchitectureConfig
from megappo.families.frozen import frozen_parameters
from megappo.families.parameters import EMBEDDING, OUTPUT_LAYER, Parameter, canonical_names, embedding, model_parameters
from megappo.families.rope import has_own_layers, rotary
from megappo.families.weights import ValueHeadWeights, WeightSource, read_shard
from megappo.megatron.heads import HiddenStatesModel, LogprobHead, ValueHead
from megappo.megatron.layers.attention import RMSNorm
from megappo.megatron.layers.delta_net import GatedDeltaNet, GatedSelfAttention
from megappo.megatron.layers.experts import use_grouped_experts
from megappo.megatron.layers.extensions import around_layers, core_attention, norms_after
from megappo.megatron.layers.latent_attention import LatentSelfAttention
from megappo.megatron.layers.lora import Switch, attach_adapters, freeze
from megappo.megatron.layers.normed_values import normed_values
from megappo.megatron.layers.rotary import PackedRotary, rotate
from megappo.megatron.layers.router import RouterChoice
from megappo.megatron.layers.routing import TokenDispatcher
from megappo.megatron.layers.swiglu import SwiGLU, is_swiglu, mlp_submodules
from megappo.megatron.layout import Layout
from megappo.megatron.local_shards import LocalAdapterShard, LocalShard, global_names
from megappo.megatron.patches.all_devices import fix_router, rotate_packed_by
from megappo.megatron.stages import StageLayers
from megappo.runtime.accelerations import Accelerations

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class BuildOptions:
    """Options of a model in addition to its architecture and layout."""

    dtype: torch.dtype
    device: torch.device
    padded_vocab: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that the distributions of `below_minimum` response tokens exclude; empty without a minimum length."""
    recompute: str = "none"
    recompute_modules: tuple[str, ...] = ("core_attn",)
    deallocate_pipeline_outputs: bool = True
    chunk_layers: tuple[int, ...] | None = None
    """Layers of each chunk of the pipeline in the order of the forward pass. With None, layers are split evenly."""
    seed: int = 0
    value_head_std: float | None = None
    """Standard deviation of the initial value head of a critic; None if the model is not a critic."""
    replays_routing: bool = False
    """Whether routers use the recorded experts of a sample instead of choosing experts."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of each layer's experts."""
    lora: LoraShape | None = None
    """Low-rank adapters that are trained instead of the weights; None if the weights are trained."""
    freeze: tuple[str, ...] = ()
    """Names of parameters that are not trained (see `families.frozen`)."""
    accelerations: Accelerations = field(default_factory=Accelerations)
    offload: OffloadSettings = field(default_factory=OffloadSettings)
    """Tensors that are offloaded between uses of the role."""
    offload_directory: Path | None = None
    """Folder for offloaded tensors on machines without CUDA; None for the temporary folder of the system."""

    @property
    def is_critic(self) -> bool:
        """Whether the output layer is a value head."""
        return self.value_head_std is not None

    @property
    def has_engine_layers(self) -> bool:
        """Whether layers are Transformer Engine layers. These layers fuse a norm with the next matrix, so adapters
        cannot be attached."""
        return self.lora is None and self.accelerations.uses_engine_layers(self.dtype)


@dataclass(frozen=True)
class RoleModel:
    """Model chunks of one rank: one chunk, or `vpp` chunks with an interleaved pipeline."""

    arch: ArchitectureConfig
    layout: Layout
    options: BuildOptions
    config: TransformerConfig
    chunks: list[HiddenStatesModel]
    switch: Switch | None = None
    """Switch that turns the adapters on and off; None for a model without adapters."""

    @property
    def is_critic(self) -> bool:
        """Whether the output layer is a value head."""
        return self.options.is_critic

    def local_parameters(self) -> list[LocalShard]:
        """Return the shards of the mapped parameters on this rank in the order of the map. The map of a critic has no
        output layer."""
        return self._shards_of(
            p for p in model_parameters(self.arch) if not (self.is_critic and p.megatron == OUTPUT_LAYER)
        )

    def local_adapters(self) -> list[LocalShard]:
        """Return the shards of the adapter matrices A and B on this rank in the order of the map."""
        lora = self.options.lora
        return [] if lora is None else self._shards_of(adapter_parameters(self.arch, lora))

    def local_trained(self) -> list[LocalShard]:
        """Return the shards that are trained on this rank: the shards of the adapters if there are adapters, otherwise
        the shards of the weights."""
        return self.local_parameters() if self.options.lora is None else self.local_adapters()

    @cached_property
    def adapter_of(self) -> dict[str, LocalAdapterShard]:
        """Adapters of this rank by the name of the parameter that they adapt."""
        lora, shards = self.options.lora, {shard.entry.megatron: shard for shard in self.local_adapters()}
        return {
            adapter.base.megatron: LocalAdapterShard(
                shards[adapter.a.megatron],
                shards[adapter.b.megatron],
                RowOrder.of(self.arch, adapter, self.layout.grid.tp),
            )
            for adapter in (adapters(self.arch, lora) if lora is not None else ())
            if adapter.a.megatron in shards
        }

    def _shards_of(self, parameters: Iterable[Parameter]) -> list[LocalShard]:
        named = self._named_parameters()
        return [LocalShard(p, *named[p.megatron]) for p in parameters if p.megatron in named]

    def _named_parameters(self) -> dict[str, tuple[nn.Parameter, int | None]]:
        """Return every parameter of this rank by its canonical name, with its index. A stacked parameter of experts
        has a name and an index for each expert."""
        canonical = canonical_names(self.arch)
        return {
            global_name: (parameter, place)
            for chunk in self.chunks
            for name, parameter in chunk.named_parameters()
            for global_name, place in global_names(chunk, name, canonical)
        }

    def check_names(self) -> None:
        """Check that this rank built exactly the mapped parameters. A missing parameter would be absent from every
        load, weight sync and export.

        Raises RunError if a parameter is not in the map, or if a mapped parameter of this rank was not built.
        """
        built = self._named_parameters().keys()
        lora = self.options.lora
        known = chain(model_parameters(self.arch), adapter_parameters(self.arch, lora) if lora is not None else ())
        expected = {p.megatron for p in known if self._is_local(p)}
        own = {OUTPUT_LAYER, "output_layer.bias"} if self.is_critic else set()
        if self.arch.tied_embeddings:  # copy of the embedding on the last stage
            own.add(OUTPUT_LAYER)
        for names, problem in (
            (built - expected - own, "parameters that are not in the map"),
            (expected - built, "too few parameters for the map"),
        ):
            if names:
                raise RunError(
                    f"Megatron-Core built a model with {problem}, such as {', '.join(sorted(names)[:3])}; "
                    "install the versions that megappo requires"
                )

    def _is_local(self, parameter: Parameter) -> bool:
        if parameter.layer is not None:
            layers = {layer.layer_number - 1: layer for chunk in self.chunks for layer in chunk.decoder.layers}
            layer = layers.get(parameter.layer)
            return layer is not None and (
                parameter.expert is None or parameter.expert in layer.mlp.local_expert_indices
            )
        if parameter.megatron == EMBEDDING:
            return self.chunks[0].pre_process
        return self.chunks[-1].post_process and not (self.is_critic and parameter.megatron == OUTPUT_LAYER)


def transformer_config(arch: ArchitectureConfig, layout: Layout, options: BuildOptions) -> TransformerConfig:
    """Return Megatron's configuration of an architecture on a layout."""
    recompute: dict[str, str | int | list[str]] = {}
    if options.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif options.recompute == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": list(options.recompute_modules)}
    if not options.has_engine_layers:
        # Megatron's rotation of packs reads segment lengths on the host, four times per layer (see `rotary`).
        rotate_packed_by(rotate)
    settings = arch.declaration.megatron(arch)
    pre_softmax = settings.pop("moe_router_pre_softmax", False)
    config = TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.dense_ffn_hidden_size or arch.ffn_hidden_size,
        layernorm_epsilon=arch.norm_eps,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=arch.initializer_range,
        perform_initialization=False,  # `_fill` writes all weights; `_mark_partition` sets their attributes
        use_cpu_initialization=options.device.type == "cpu",
        params_dtype=options.dtype,
        bf16=options.dtype == torch.bfloat16,
        pipeline_dtype=options.dtype,
        autocast_dtype=options.dtype,
        tensor_model_parallel_size=layout.grid.tp,
        context_parallel_size=layout.grid.cp,
        pipeline_model_parallel_size=layout.grid.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=_stage_layers(arch, layout, options),
        sequence_parallel=layout.sequence_parallel,
        variable_seq_lengths=layout.grid.pp > 1,  # packed microbatches differ in length
        moe_token_dispatcher_type="alltoall",  # the default does not support variable lengths
        expert_model_parallel_size=layout.grid.ep,
        expert_tensor_parallel_size=1,
        # A batch of an interleaved schedule could swap activations and gradients for the same rank, because it
        # matches messages by order. With overlap, each message has a separate call.
        overlap_p2p_comm=layout.vpp > 1,
        deallocate_pipeline_outputs=options.deallocate_pipeline_outputs,
        batch_p2p_comm=layout.vpp == 1,
        calculate_per_token_loss=True,  # losses are already divided by the global count
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=True,  # by `rotate`, or by Transformer Engine's kernel
        use_te_activation_func=is_swiglu(settings),  # `SwiGLU`, not Transformer Engine's
        add_bias_linear=settings.pop("add_bias_linear", False),
        # Megatron rejects a softmax over one chosen expert, because the router learns nothing. transformers computes
        # this softmax. The field is therefore reset after Megatron's check.
        moe_router_pre_softmax=pre_softmax or settings.get("moe_router_topk") == 1,
        **options.accelerations.switches(options.dtype),
        **settings,
        **recompute,
    )
    config.moe_router_pre_softmax = pre_softmax
    return config


def _stage_layers(arch: ArchitectureConfig, layout: Layout, options: BuildOptions) -> StageLayers | None:
    pp = layout.grid.pp
    if pp == 1:
        return None
    return StageLayers(options.chunk_layers or even_layers(arch.layers, pp * layout.vpp), pp, layout.stage)


def layer_spec(
    config: TransformerConfig, layout: Layout, vp_stage: int | None, options: BuildOptions, arch: ArchitectureConfig
) -> ModuleSpec | TransformerBlockSubmodules:
    """Return the spec of the layers: Transformer Engine layers if they are supported, otherwise Megatron's layers with
    megappo's attention and norm."""
    if options.has_engine_layers:
        parts = {"num_experts": config.num_moe_experts, "qk_layernorm": config.qk_layernorm}
        layer = get_gpt_layer_with_transformer_engine_spec(**parts)
        return _with_own_mlp(layer, config, arch, has_experts=arch.experts > 0)
    layers = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=layout.stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=layout.stage)
    kinds_of_layers = [(n in arch.expert_layers, n in arch.special_layers) for n in range(first, first + layers)]
    kinds = {kind: _own_layer(config, arch, has_experts=kind[0], is_special=kind[1]) for kind in set(kinds_of_layers)}
    return TransformerBlockSubmodules(layer_specs=[kinds[kind] for kind in kinds_of_layers], layer_norm=RMSNorm)


def _with_own_mlp(
    layer: ModuleSpec, config: TransformerConfig, arch: ArchitectureConfig, *, has_experts: bool
) -> ModuleSpec:
    """Put megappo's experts or activation into the spec of a layer and return the spec."""
    if has_experts:
        use_grouped_experts(layer, shares_one=arch.shared_ffn_hidden_size > 0)
    elif config.use_te_activation_func:
        mlp_submodules(layer).activation_func = SwiGLU
    return layer


def _own_layer(
    config: TransformerConfig, arch: ArchitectureConfig, *, has_experts: bool, is_special: bool
) -> ModuleSpec:
    experts, extensions = config.num_moe_experts if has_experts else None, arch.extensions
    layer = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    _with_own_mlp(layer, config, arch, has_experts=has_experts)
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = core_attention(extensions)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if extensions.norms_after:
        norms_after(layer)
    if is_special and arch.delta_net is not None:
        layer.submodules.self_attention = ModuleSpec(GatedDeltaNet, params={"shape": arch.delta_net})
    elif arch.latent is not None:
        layer.submodules.self_attention = ModuleSpec(LatentSelfAttention, params={"shape": arch.latent})
    elif config.attention_output_gate:
        layer.submodules.self_attention.module = GatedSelfAttention
    elif arch.wide_attention is not None:
        normed_values(layer, arch.wide_attention if is_special else None)
    return layer


def build_model(
    arch: ArchitectureConfig,
    layout: Layout,
    options: BuildOptions,
    source: WeightSource,
    adapters_from: WeightSource | None = None,
) -> RoleModel:
    """Build this rank's chunks of a role, fill them from `source`, and fill their adapters from `adapters_from`."""
    if arch.experts:
        fix_router()
    options = replace(options, accelerations=options.accelerations.for_model(own_layers=has_own_layers(arch)))
    model_parallel_cuda_manual_seed(
        options.seed, tp_rank=layout.tensor_rank, ep_rank=layout.expert_rank, etp_rank=0, force_reset_rng=True
    )
    config = transformer_config(arch, layout, options)
    chunks = [_build_chunk(arch, layout, options, config, chunk) for chunk in range(layout.vpp)]
    lora, is_critic = options.lora, options.is_critic
    switch = None if lora is None else attach_adapters(arch, layout, lora, chunks, is_critic=is_critic)
    model = RoleModel(arch, layout, options, config, chunks, switch)
    model.check_names()
    freeze(model.local_trained(), frozen_parameters(arch, options.freeze, options.lora), chunks)
    for number, layer in enumerate(layer for chunk in chunks for layer in chunk.decoder.layers):
        if layer.layer_number - 1 in arch.expert_layers:
            RouterChoice(layer, number, layout.tensor_rank, layout.sample_group)
    with torch.no_grad():
        _fill(model, model.local_parameters(), source)
        if adapters_from is not None:
            _fill(model, model.local_adapters(), adapters_from)
        _fill_last_stage_copy(model, source)
        _fill_value_head(model, (adapters_from, source))
    return model


def _fill(model: RoleModel, parameters: Iterable[LocalShard], source: WeightSource) -> None:
    layout = model.layout
    place = (layout.tensor_rank, layout.grid.tp, model.options.padded_vocab)
    for local in parameters:
        _mark_partition(local.entry, local.parameter, layout)
        local.shard.copy_(read_shard(source, model.arch, local.entry, local.shard, *place))


def _mark_partition(entry: Parameter, parameter: nn.Parameter, layout: Layout) -> None:
    """Set the attributes of tensor parallel parameters that Megatron sets during its own initialisation. Without these
    attributes, the gradient norm counts one shard instead of all shards.

    Experts are whole on their rank for all tensor ranks. If one rank has all experts, Megatron would treat them as
    dense parameters and omit the gradients from tokens of other tensor parallel ranks.
    """
    if entry.expert is not None:
        parameter.allreduce = False  # type: ignore[attr-defined]
        if not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    elif layout.grid.tp > 1 and entry.axis is not None and not hasattr(parameter, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(parameter, True, entry.axis, 1)


def _build_chunk(
    arch: ArchitectureConfig, layout: Layout, options: BuildOptions, config: TransformerConfig, chunk: int
) -> HiddenStatesModel:
    vp_stage = chunk if layout.vpp > 1 else None
    first = layout.stage == 0 and chunk == 0
    last = layout.is_last_stage and chunk == layout.vpp - 1
    model = HiddenStatesModel(
        config=config,
        transformer_layer_spec=layer_spec(config, layout, vp_stage, options, arch),
        vocab_size=options.padded_vocab,
        max_sequence_length=arch.max_position_embeddings,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied_embeddings and not options.is_critic,
        position_embedding_type="rope",
        pg_collection=layout.groups,
        vp_stage=vp_stage,
    )
    for layer in (layer for layer in model.decoder.layers if layer.layer_number - 1 in arch.expert_layers):
        layer.mlp.token_dispatcher = TokenDispatcher(config, layout.groups)
        if arch.sigmoid_router:
            layer.mlp.router.correction_bias = nn.Parameter(torch.zeros(arch.experts), requires_grad=False)
    model.to(options.device)  # the router's weight and the norms are created on the CPU
    ropes = [rope._replace(inverse_frequencies=rope.inverse_frequencies.to(options.device)) for rope in rotary(arch)]
    if options.has_engine_layers:
        model.rotary_pos_emb.inv_freq = ropes[0].inverse_frequencies
    else:
        model.rotary_pos_emb = PackedRotary(ropes)
    around_layers(model, arch)
    if last and options.value_head_std is not None:
        model.output_layer = ValueHead(layout, arch.hidden_size, options.dtype, options.device)
        generator = torch.Generator().manual_seed(options.seed)
        drawn = torch.randn(1, arch.hidden_size, generator=generator) * options.value_head_std
        model.output_layer.weight.data.copy_(drawn)
    elif last:
        own = model.output_layer.weight  # None for a tied embedding of the same stage
        model.output_layer = LogprobHead(
            layout,
            model.shared_embedding_or_output_weight() if own is None else own,
            is_tied=own is None,
            vocab_size=arch.vocab_size,
            temperature=options.temperature,
            stop_token_ids=options.stop_token_ids,
            cap=arch.extensions.logits_cap,
        )
    return model


def first_value_head(sources: Iterable[WeightSource | None]) -> ValueHeadWeights | None:
    """Return the value head of the first source that has one."""
    heads = (source.value_head() for source in sources if source is not None)
    return next((head for head in heads if head is not None), None)


def _fill_value_head(model: RoleModel, sources: Iterable[WeightSource | None]) -> None:
    """Replace the initial value head with a trained one if a source has a value head."""
    last = model.chunks[-1]
    head = first_value_head(sources) if model.is_critic and last.post_process else None
    if head is not None:
        last.output_layer.weight.copy_(head.weight)
        last.output_layer.bias.copy_(head.bias)


def _fill_last_stage_copy(model: RoleModel, source: WeightSource) -> None:
    """Fill the copy of a tied embedding on the last stage. A pipeline trains this copy of the first stage's
    embedding."""
    last = model.chunks[-1]
    if model.arch.tied_embeddings and last.post_process and not last.pre_process and not model.is_critic:
        _fill(model, [LocalShard(embedding(model.arch), last.output_layer.weight)], source)
