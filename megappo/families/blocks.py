"""Blocks of the layers of several families.

Matrices have the shape (rows, columns) = (outputs, inputs), as in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megappo.families.declaration import ArchitectureConfig, Block, PerToken, Weight
from megappo.families.fields import Activation, MegatronSettings


def norm(megatron: str, hf: str, channels: int, alias: str = "") -> Weight:
    """Return the weight of an RMSNorm."""
    return Weight(megatron, {hf: (channels,)}, "replicated", alias=alias)


def mlp_norm(arch: ArchitectureConfig) -> Weight:
    """Return the norm before an MLP of any kind."""
    alias = "mlp.linear_fc1.layer_norm_weight"
    return norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", arch.hidden_size, alias)


class Attention(Block):
    """Attention block: the norm before it, grouped-query attention with rotary positions, and the output matrix."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        hidden, queries, keys = arch.hidden_size, arch.query_width, arch.key_width
        qkv = {"self_attn.q_proj.weight": (queries, hidden)}
        qkv |= dict.fromkeys(("self_attn.k_proj.weight", "self_attn.v_proj.weight"), (keys, hidden))
        fused_norm = "self_attention.linear_qkv.layer_norm_weight"
        return (
            norm("input_layernorm.weight", "input_layernorm.weight", hidden, fused_norm),
            Weight("self_attention.linear_qkv.weight", qkv, "qkv", fused="self_attn.qkv_proj.weight"),
            Weight("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": (hidden, queries)}, "row"),
        )

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        width = arch.score_width or arch.head_dim
        some = {"window_attn_skip_freq": [int(has) for has in arch.windowed_layers]} if arch.windowed_layers else {}
        return {
            "window_size": None if arch.sliding_window is None else (arch.sliding_window - 1, 0),
            "softmax_scale": None if width == arch.head_dim else width**-0.5,
            **some,
        }


class QueryKeyValueBiases(Block):
    """Biases of queries, keys and values."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        biases = {"self_attn.q_proj.bias": (arch.query_width,)}
        biases |= dict.fromkeys(("self_attn.k_proj.bias", "self_attn.v_proj.bias"), (arch.key_width,))
        return (Weight("self_attention.linear_qkv.bias", biases, "qkv", fused="self_attn.qkv_proj.bias"),)

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        return {"add_qkv_bias": True}


class QueryKeyNorms(Block):
    """Norms over the channels of each head's query and key, before the rotation."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        names = (("self_attention.q_layernorm", "self_attn.q_norm"), ("self_attention.k_layernorm", "self_attn.k_norm"))
        return tuple(norm(f"{megatron}.weight", f"{hf}.weight", arch.head_dim) for megatron, hf in names)

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        return {"qk_layernorm": True}

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        """Return the activations: contiguous queries and a scale for each head. Keys are a view of the QKV matrix's
        output. torch's composite implementation on a CPU uses float32 and also stores the normalised input."""
        scales = 4.0 * (arch.heads + arch.kv_heads)
        if fused or not arch.declaration.norms_in_float32(arch, element_bytes):
            return PerToken(activation_bytes=scales + element_bytes * arch.query_width)
        copied_keys = 4 * arch.key_width if element_bytes == 2 else 0
        return PerToken(activation_bytes=scales + 4 * (2 * arch.query_width + arch.key_width) + copied_keys)


def gated(place: str, arch: ArchitectureConfig, ffn: int, stored: str = "") -> tuple[Weight, Weight]:
    """Return the matrices of a gated MLP. `place`: module in Megatron's model; `stored`: module in files, if
    different."""
    stored = stored or place
    gate_up = dict.fromkeys((f"{stored}.gate_proj.weight", f"{stored}.up_proj.weight"), (ffn, arch.hidden_size))
    return (
        Weight(f"{place}.linear_fc1.weight", gate_up, "column", fused=f"{stored}.gate_up_proj.weight"),
        Weight(f"{place}.linear_fc2.weight", {f"{stored}.down_proj.weight": (arch.hidden_size, ffn)}, "row"),
    )


class GatedMlp(Block):
    """MLP block: the norm before it, and SwiGLU: down(silu(gate) * up)."""

    recompute_module = "mlp"

    def size(self, arch: ArchitectureConfig) -> int:
        """Return the number of channels between the matrices."""
        return arch.ffn_hidden_size

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        return (mlp_norm(arch), *gated("mlp", arch, self.size(arch)))

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        return {"gated_linear_unit": True}

    def activation(self, arch: ArchitectureConfig) -> Activation | None:
        from torch.nn.functional import silu

        return silu

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        """Return the activations: gate, up and their product. torch's operations also store silu(gate)."""
        width = (3 if fused else 4) * self.size(arch)
        return PerToken(activation_bytes=element_bytes * width, live_elements=width, moved_elements=width)


class FirstMlp(GatedMlp):
    """MLP of the first layers in models with experts in the other layers."""

    def size(self, arch: ArchitectureConfig) -> int:
        return arch.dense_ffn_hidden_size

    def layers(self, arch: ArchitectureConfig) -> range:
        return range(arch.dense_layers)

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        return {"moe_layer_freq": [int(layer in arch.expert_layers) for layer in range(arch.layers)]}


class SharedExpert(GatedMlp):
    """Shared expert, which processes every token in addition to the routed experts: SwiGLU of the router's input."""

    recompute_module = "moe"

    def size(self, arch: ArchitectureConfig) -> int:
        return arch.shared_ffn_hidden_size

    def layers(self, arch: ArchitectureConfig) -> range:
        return arch.expert_layers

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        return gated("mlp.shared_experts", arch, self.size(arch))

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        return {"moe_shared_expert_intermediate_size": self.size(arch)}


@dataclass(frozen=True)
class Experts(GatedMlp):
    """Experts block: the norm before it, a router, and SwiGLU in each expert.

    No token is dropped. The objective of the role trains the router, and also `router_aux_loss_coef` if it is set. A
    sigmoid router has a bias for each expert, which balanced the load in pretraining (Wang et al. 2024,
    arXiv:2408.15664). Training does not change this bias.
    """

    stored: str = "mlp"
    """Module of a layer's router and experts in files and in SGLang. transformers uses `mlp`."""
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's matrices in files."""
    wide_router: bool = False
    """Whether engines and files store the router in float32, like the correction bias."""

    recompute_module = "moe"

    def layers(self, arch: ArchitectureConfig) -> range:
        return arch.expert_layers

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        hidden, ffn = arch.hidden_size, arch.ffn_hidden_size
        gate, up, down = (f"{self.stored}.experts.{{expert}}.{name}.weight" for name in self.matrices)
        megatron = "mlp.experts.{expert}"  # Megatron-Core has one parameter for all experts of a rank
        w13 = partial(Weight, fused=f"{self.stored}.experts.w13_weight", packed="mlp.experts.gate_up_proj")
        w2 = partial(Weight, fused=f"{self.stored}.experts.w2_weight", packed="mlp.experts.down_proj")
        gates = {f"{self.stored}.gate.weight": (arch.experts, hidden)}
        router = [Weight("mlp.router.weight", gates, "replicated", packed="mlp.gate.weight", wide=self.wide_router)]
        if arch.sigmoid_router:
            bias = {f"{self.stored}.gate.e_score_correction_bias": (arch.experts,)}
            router.append(Weight("mlp.router.correction_bias", bias, "replicated", wide=True))
        return (
            mlp_norm(arch),
            *router,
            w13(f"{megatron}.weight1", dict.fromkeys((gate, up), (ffn, hidden)), "column"),
            w2(f"{megatron}.weight2", {down: (hidden, ffn)}, "row"),
        )

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        of_sigmoids: MegatronSettings = {
            "moe_router_score_function": "sigmoid",
            "moe_router_topk_scaling_factor": arch.experts_scale,
        }
        if arch.expert_groups > 1:
            of_sigmoids["moe_router_num_groups"] = arch.expert_groups
            of_sigmoids["moe_router_group_topk"] = arch.groups_per_token
        return super().megatron(arch) | {
            "num_moe_experts": arch.experts,
            "moe_ffn_hidden_size": arch.ffn_hidden_size,
            "moe_router_topk": arch.experts_per_token,
            # False: softmax of the selected logits, equal to the renormalised softmax of all logits.
            "moe_router_pre_softmax": not arch.normalized_experts,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            **(of_sigmoids if arch.sigmoid_router else {}),
        }

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        """Return the activations: the router's weights, and several values for each expert of a token. These are the
        expert's number and weight, the positions of the row in both directions, the input, gate and up, and the
        product times the expert's weight.

        torch's operations also store silu(gate) and the unweighted product, and compute the weighted product in
        float32. The hidden state of a routed token is copied four times: sorted for sending, received, sorted by
        expert, and returned.
        """
        hidden, ffn, routed = arch.hidden_size, arch.ffn_hidden_size, arch.experts_per_token
        width = (3 if fused else 5) * ffn
        widened = (4 // element_bytes if element_bytes < 4 and not fused else 0) * ffn
        return PerToken(
            activation_bytes=4.0 * arch.experts + 56 * routed + routed * element_bytes * (hidden + width),
            live_elements=routed * (width + widened + 4 * hidden),
            moved_elements=routed * (width + 4 * hidden),
        )
