"""Qwen3-Next: linear attention by a gated delta net in most layers, in the others attention with a gate behind it, and
experts, of which every token passes one through a gate of its own. A norm's weight is what it multiplies by, less 1,
but for that of the delta net."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from megappo.families.architecture import DELTA_CHUNK, ArchitectureConfig, DeltaNet
from megappo.families.blocks import Attention, Experts, QueryKeyNorms, SharedExpert, gated, norm
from megappo.families.declaration import Block, Family, PerToken, Weight
from megappo.families.reading import experts, no_attention_bias, partly_rotated_decoder, silu_mlp
from megappo.families.served import Served, unread_rope

_KINDS = ("linear_attention", "full_attention")


def delta_net(c: Any) -> dict[str, Any]:
    """The layers with linear attention and their sizes. Raises ValueError for layers of other kinds, for a model that
    lacks one of the two, and for heads, windows and gates that transformers computes otherwise."""
    kinds = tuple(c.layer_types)
    other = [kind for kind in kinds if kind not in _KINDS]
    if other or len(set(kinds)) < 2:
        found = f"'{other[0]}'" if other else f"'{kinds[0]}' alone"
        raise ValueError(f"layer_types of {found} is not supported; use a model of {' and '.join(_KINDS)}")
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
            f"sliding_window {window} means nothing to transformers for {c.model_type}, whose tokens see all before "
            "them; take it out of config.json"
        )
    if not getattr(c, "attn_output_gate", True):
        raise ValueError("attn_output_gate: false is not supported; use a model whose attention has the gate (true)")
    sizes = (c.linear_key_head_dim, c.linear_value_head_dim, width)
    layers = tuple(n for n, kind in enumerate(kinds) if kind == "linear_attention")
    return {"delta_net": DeltaNet(layers, keys, values, *sizes)}


def shared_expert(c: Any) -> dict[str, Any]:
    """That which every token passes. Raises ValueError where there is none."""
    size = c.shared_expert_intermediate_size
    if size < 1:
        raise ValueError(f"shared_expert_intermediate_size {size} is not supported; use a model with at least 1")
    return {"shared_ffn_hidden_size": size}


class GatedAttention(Attention):
    """Attention whose output is multiplied by the sigmoid of a gate. Its rows stand behind those of each head in the
    matrix of queries."""

    def layers(self, arch: ArchitectureConfig) -> Collection[int]:
        return arch.attention_layers

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        before, qkv, out = super().weights(arch)
        queries, *others = qkv.tensors
        tensors = {queries: (2 * arch.query_width, arch.hidden_size), **{name: qkv.tensors[name] for name in others}}
        return before, Weight(qkv.megatron, tensors, "qkv", fused=qkv.fused), out

    def megatron(self, arch: ArchitectureConfig) -> dict[str, Any]:
        return super().megatron(arch) | {"attention_output_gate": True, "layernorm_zero_centered_gamma": True}

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        """The gate, its sigmoid, and what attention gave."""
        width = 3 * arch.query_width
        return PerToken(kept_bytes=element_bytes * width, live_elements=width, moved_elements=width)


class AttentionNorms(QueryKeyNorms):
    """In the layers with attention."""

    def layers(self, arch: ArchitectureConfig) -> Collection[int]:
        return arch.attention_layers


class LinearAttention(Block):
    """The norm before it, and a gated delta net: a causal convolution, the recurrence, a norm with a gate."""

    def layers(self, arch: ArchitectureConfig) -> Collection[int]:
        return arch.linear_layers

    def inputs(self, arch: ArchitectureConfig, net: DeltaNet) -> tuple[Weight, Weight]:
        """The matrices before it. Files have what belongs to a key head together: query, key, values, and the gates of
        the values; the strengths of its value heads, and what makes their decays."""
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
        """Kept: the output of the matrices; what the convolution takes, with zeros before segments, gives, and what
        silu makes of it, which the recurrence begins from again in backward; decays and strengths; what it read, normed
        and times the gate, in float32. There at once while it runs, in float32 and with gradients: each head's queries,
        keys, values, corrections, products of a chunk's tokens, and states."""
        net = arch.delta_net
        assert net is not None
        mixed, heads, e = 2 * net.key_width + net.value_width, net.value_heads, element_bytes
        kept = e * (4 * mixed + 3 * net.value_width) + 16.0 * net.value_width + (8 + 4 * e) * heads
        of_head = 4 * (net.key_dim + net.value_dim) + 3 * DELTA_CHUNK + 2 * net.key_dim * net.value_dim // DELTA_CHUNK
        live = 2 * 4 * heads * of_head // e
        return PerToken(kept_bytes=kept, live_elements=live, moved_elements=live)


class GatedSharedExpert(SharedExpert):
    """With a gate of one number for each token."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        matrices = gated("mlp.shared_experts", arch, self.size(arch), "mlp.shared_expert")
        gate = {"mlp.shared_expert_gate.weight": (1, arch.hidden_size)}
        return (*matrices, Weight("mlp.shared_experts.gate_weight", gate, "replicated"))

    def megatron(self, arch: ArchitectureConfig) -> dict[str, Any]:
        return {**super().megatron(arch), "moe_shared_expert_gate": True}


def unserved(arch: ArchitectureConfig, asked: Served) -> str:
    """SGLang 0.5.23 starts none without Triton's driver, and counts layers from one with attention to the next."""
    if not asked.on_cuda:
        return f"SGLang's {arch.family} needs a GPU, and the run is on a CPU"
    if interval(arch.hf_config) is None:
        return (
            f"SGLang's {arch.family} has attention in every n-th layer, and layer_types in config.json says otherwise"
        )
    return unread_rope(arch)


def interval(c: Any) -> int | None:
    """Every n-th layer has attention; None where it is not so."""
    n = c.layer_types.index("full_attention") + 1
    regular = [_KINDS[(layer + 1) % n == 0] for layer in range(len(c.layer_types))]
    return n if list(c.layer_types) == regular else None


def full_attention_interval(c: Any) -> dict[str, Any]:
    """Of which transformers makes `layer_types`, which SGLang does not read."""
    n = interval(c)
    return {} if n is None else {"full_attention_interval": n}


FURTHER_COUNT = "mtp_num_hidden_layers"


def further_layers(arch: ArchitectureConfig) -> tuple[str, ...]:
    """With what stands before and behind them."""
    return ("mtp.",)


FAMILY = Family(
    "qwen3_next",
    reads=(partly_rotated_decoder, silu_mlp, no_attention_bias, experts, shared_expert, delta_net),
    blocks=(GatedAttention(), AttentionNorms(), LinearAttention(), Experts(), GatedSharedExpert()),
    unserved=unserved,
    adapted=False,
    further=full_attention_interval,
    further_layers=further_layers,
    further_count=FURTHER_COUNT,
    fingerprinted=False,
)
