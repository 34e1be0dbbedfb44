"""Qwen3-Next: a gated delta net (linear attention) in most layers, attention with an output gate in the other
layers, and experts with a gated shared expert. Norms multiply by 1 plus their weights, except the norm of the delta
net."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megappo.families.architecture import DELTA_CHUNK, DeltaNet
from megappo.families.blocks import Attention, Experts, QueryKeyNorms, SharedExpert, gated, norm
from megappo.families.declaration import ArchitectureConfig, Block, Family, PerToken, Weight
from megappo.families.fields import Fields, HFConfig, MegatronSettings
from megappo.families.reading import experts, no_attention_bias, partly_rotated_decoder, silu_mlp, two_kinds
from megappo.families.served import NEEDS_GPU, Served, unread_rope, unread_ties

_KINDS = ("linear_attention", "full_attention")


def delta_net(c: HFConfig) -> Fields:
    """Read the layers with linear attention and their sizes.

    Raises ValueError unless the model has layers of exactly two kinds, with linear and with full attention. Also
    raises ValueError for heads, windows and gates that transformers computes differently.
    """
    kinds = two_kinds(c, _KINDS)
    keys, values, width = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_conv_kernel_dim
    if keys < 1 or values % keys or values < keys:
        raise ValueError(
            f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}; fix its config.json"
        )
    if not 2 <= width <= 4:
        raise ValueError(f"linear_conv_kernel_dim {width} is not supported; use a model with 2 to 4")
    window = None if getattr(c, "use_sliding_window", None) is False else getattr(c, "sliding_window", None)
    if window is not None:
        raise ValueError(
            f"sliding_window {window} is ignored by transformers for {c.model_type}; remove sliding_window from "
            "config.json"
        )
    if not getattr(c, "attn_output_gate", True):
        raise ValueError("attn_output_gate: false is not supported; use a model whose attention has the gate (true)")
    sizes = (c.linear_key_head_dim, c.linear_value_head_dim, width)
    layers = tuple(n for n, kind in enumerate(kinds) if kind == "linear_attention")
    return {"delta_net": DeltaNet(layers, keys, values, *sizes)}


def shared_expert(c: HFConfig) -> Fields:
    """Read the size of the shared expert. Raises ValueError for models without a shared expert."""
    size = c.shared_expert_intermediate_size
    if size < 1:
        raise ValueError(f"shared_expert_intermediate_size {size} is not supported; use a model with at least 1")
    return {"shared_ffn_hidden_size": size}


class GatedAttention(Attention):
    """Attention with an output gate: the output is multiplied by the sigmoid of the gate. In the query matrix, the
    rows of a head's gate follow the rows of its query."""

    def layers(self, arch: ArchitectureConfig) -> Collection[int]:
        return arch.attention_layers

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        before, qkv, out = super().weights(arch)
        queries, *others = qkv.tensors
        tensors = {queries: (2 * arch.query_width, arch.hidden_size), **{name: qkv.tensors[name] for name in others}}
        return before, Weight(qkv.megatron, tensors, "qkv", fused=qkv.fused), out

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        return super().megatron(arch) | {"attention_output_gate": True, "layernorm_zero_centered_gamma": True}

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        """Return the activations: the gate, its sigmoid, and the output of attention."""
        width = 3 * arch.query_width
        return PerToken(activation_bytes=element_bytes * width, live_elements=width, moved_elements=width)


class AttentionNorms(QueryKeyNorms):
    """Norms of queries and keys in the layers with attention."""

    def layers(self, arch: ArchitectureConfig) -> Collection[int]:
        return arch.attention_layers


class LinearAttention(Block):
    """Linear attention block: the norm before it, and a gated delta net. The delta net consists of a causal
    convolution, the recurrence and a gated norm."""

    def layers(self, arch: ArchitectureConfig) -> Collection[int]:
        return arch.linear_layers

    def inputs(self, arch: ArchitectureConfig, net: DeltaNet) -> tuple[Weight, Weight]:
        """Return the two input matrices, whose rows files group by key head.

        The first matrix computes queries, keys, values and the gates of the values. The second matrix computes the
        strengths of the value heads and the inputs of their decays.
        """
        names = ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight")
        rows = (2 * net.key_width + 2 * net.value_width, 2 * net.value_heads)
        first, second = ({name: (n, arch.hidden_size)} for name, n in zip(names, rows, strict=True))
        return (
            Weight("self_attention.in_proj.weight", first, "column"),
            Weight("self_attention.gates_proj.weight", second, "column"),
        )

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        net = arch.delta_net
        assert net is not None
        hidden, heads = arch.hidden_size, (net.value_heads,)
        channels = (net.key_width, net.key_width, net.value_width)
        convolution = {"linear_attn.conv1d.weight": (sum(channels), 1, net.conv_width)}
        return (
            norm("input_layernorm.weight", "input_layernorm.weight", hidden),
            *self.inputs(arch, net),
            Weight("self_attention.conv_weight", convolution, "grouped", sections=(channels,)),
            Weight("self_attention.rate_bias", {"linear_attn.dt_bias": heads}, "column", drawn="ones"),
            Weight("self_attention.log_rate", {"linear_attn.A_log": heads}, "column", drawn="rates"),
            Weight(
                "self_attention.norm_weight", {"linear_attn.norm.weight": (net.value_dim,)}, "replicated", drawn="ones"
            ),
            Weight("self_attention.out_proj.weight", {"linear_attn.out_proj.weight": (hidden, net.value_width)}, "row"),
        )

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        """Return the activations. Forward stores the output of the input matrices; the input of the convolution with
        zeros before segments, its output and silu of its output; decays and strengths; and the reads of the state in
        float32, also normed and gated. Backward recomputes the recurrence from these values.

        During the recurrence, float32 values and gradients are in memory: queries, keys, values and corrections of
        each head, products of a chunk's tokens, and states.
        """
        net = arch.delta_net
        assert net is not None
        mixed, heads, e = 2 * net.key_width + net.value_width, net.value_heads, element_bytes
        stored_bytes = e * (4 * mixed + 3 * net.value_width) + 16.0 * net.value_width + (8 + 4 * e) * heads
        of_head = 4 * (net.key_dim + net.value_dim) + 3 * DELTA_CHUNK + 2 * net.key_dim * net.value_dim // DELTA_CHUNK
        live = 2 * 4 * heads * of_head // e
        return PerToken(activation_bytes=stored_bytes, live_elements=live, moved_elements=live)


class GatedSharedExpert(SharedExpert):
    """Shared expert with a gate: one number per token."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        matrices = gated("mlp.shared_experts", arch, self.size(arch), "mlp.shared_expert")
        gate = {"mlp.shared_expert_gate.weight": (1, arch.hidden_size)}
        return (*matrices, Weight("mlp.shared_experts.gate_weight", gate, "replicated"))

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        return {**super().megatron(arch), "moe_shared_expert_gate": True}


def unserved(arch: ArchitectureConfig, conditions: Served) -> str:
    """Return the reason why SGLang cannot compute the model. SGLang requires Triton's driver, and attention in every
    n-th layer."""
    if not conditions.on_cuda:
        return NEEDS_GPU
    if interval(arch.hf_config) is None:
        return "expects attention in every n-th layer, but layer_types of config.json differs"
    return unread_ties(arch) or unread_rope(arch)


def interval(c: HFConfig) -> int | None:
    """Return n for models with attention in every n-th layer, and None for other models."""
    n = c.layer_types.index("full_attention") + 1
    regular = [_KINDS[(layer + 1) % n == 0] for layer in range(len(c.layer_types))]
    return n if list(c.layer_types) == regular else None


def extra_config(c: HFConfig) -> Fields:
    """Return the entries of config.json that SGLang reads instead of `layer_types` and the factor in
    `rope_parameters`."""
    n = interval(c)
    factor = c.rope_parameters.get("partial_rotary_factor", c.partial_rotary_factor)
    return {"partial_rotary_factor": factor} | ({} if n is None else {"full_attention_interval": n})


def mtp_layers(arch: ArchitectureConfig) -> tuple[str, ...]:
    """Return the name prefix of the multi-token prediction layers and of their input and output parameters."""
    return ("mtp.",)


FAMILY = Family(
    "qwen3_next",
    reads=(partly_rotated_decoder, silu_mlp, no_attention_bias, experts, shared_expert, delta_net),
    blocks=(GatedAttention(), AttentionNorms(), LinearAttention(), Experts(), GatedSharedExpert()),
    unserved=unserved,
    adapted=False,
    extra_config=extra_config,
    mtp_layers=mtp_layers,
    mtp_count_field="mtp_num_hidden_layers",
    fingerprinted=False,
)
