"""gpt-oss: attention with sinks and biases, a window in every second layer, and experts with biases and a clamped
SwiGLU. Files store one tensor for all experts of a layer. OpenAI publishes the experts in MXFP4."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from megappo.families.architecture import ArchitectureExtensions
from megappo.families.blocks import Attention, Experts, QueryKeyValueBiases, mlp_norm
from megappo.families.declaration import ArchitectureConfig, Family, Kind, PerToken, Weight
from megappo.families.fields import Activation, Fields, HFConfig, MegatronSettings
from megappo.families.reading import decoder, expert_counts, window_by_layer_types
from megappo.families.served import Served

_STORED = "quantization_config"


def stored_decoder(c: HFConfig) -> Fields:
    """Read the sizes of a model with plain or MXFP4 experts. Raises ValueError for every other quantisation."""
    stored, plain = getattr(c, _STORED, None), copy.copy(c)
    is_mxfp4 = isinstance(stored, Mapping) and stored.get("quant_method") == "mxfp4"
    if is_mxfp4:
        delattr(plain, _STORED)
    fields = decoder(plain)
    if fields["stored_blocks"] is not None:
        raise ValueError(f"{_STORED} of fp8 is not supported for this family; use its plain weights, or those in mxfp4")
    return {**fields, "stored_mxfp4": is_mxfp4}


def experts(c: HFConfig) -> Fields:
    """Read the experts of every layer. Their weights sum to 1.

    Raises ValueError for settings that transformers ignores, and for clamps that are not positive.
    """
    if c.hidden_act != "silu":
        raise ValueError(
            f"hidden_act '{c.hidden_act}' is ignored by transformers for {c.model_type}, because the activation of its "
            "experts is fixed; set hidden_act to silu"
        )
    if not c.attention_bias:
        raise ValueError("attention_bias: false is not supported for this family; use a model with true")
    for name in ("swiglu_alpha", "swiglu_limit"):
        if getattr(c, name) <= 0:
            raise ValueError(f"{name} {getattr(c, name)} must be above 0")
    if c.attention_dropout:
        raise ValueError(
            f"attention_dropout {c.attention_dropout} changes the trained policy, but not the sampling policy; "
            "set it to 0"
        )
    return {**expert_counts(c, "num_local_experts"), "extensions": ArchitectureExtensions(sinks=True)}


class SinkAttention(Attention):
    """Attention with a sink for each head and an output bias."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        sinks = {"self_attn.sinks": (arch.heads,)}
        bias = {"self_attn.o_proj.bias": (arch.hidden_size,)}
        return (
            *super().weights(arch),
            Weight("self_attention.core_attention.sinks", sinks, "column", drawn="normal"),
            Weight("self_attention.linear_proj.bias", bias, "replicated"),
        )

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        return super().megatron(arch) | {"add_bias_linear": True}


class BiasedExperts(Experts):
    """Experts with biases in the router and in both products, and with clamped gate and up."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        hidden, ffn = arch.hidden_size, arch.ffn_hidden_size
        one = "mlp.experts.{expert}"  # same name in Megatron's model and in the map's tensors
        gate, up, down = (f"{one}.{name}_proj" for name in ("gate", "up", "down"))

        weights, biases = ((f"{gate}.{kind}", f"{up}.{kind}") for kind in ("weight", "bias"))

        def of_one(place: str, tensors: dict[str, tuple[int, ...]], kind: Kind, packed: str) -> Weight:
            return Weight(f"{one}.{place}", tensors, kind, packed=f"mlp.experts.{packed}", interleaved=True)

        return (
            mlp_norm(arch),
            Weight("mlp.router.weight", {"mlp.router.weight": (arch.experts, hidden)}, "replicated"),
            Weight("mlp.router.bias", {"mlp.router.bias": (arch.experts,)}, "replicated"),
            of_one("weight1", dict.fromkeys(weights, (ffn, hidden)), "column", "gate_up_proj"),
            of_one("bias1.bias", dict.fromkeys(biases, (ffn,)), "column", "gate_up_proj_bias"),
            of_one("weight2", {f"{down}.weight": (hidden, ffn)}, "row", "down_proj"),
            of_one("bias2.bias", {f"{down}.bias": (hidden,)}, "replicated", "down_proj_bias"),
        )

    def activation(self, arch: ArchitectureConfig) -> Activation:
        from megappo_kernels.clamped import ClampedSwiGLU

        c: HFConfig = arch.hf_config
        return ClampedSwiGLU(c.swiglu_alpha, c.swiglu_limit)

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        """Return the activations: gate and up, the product times the expert's weight, and the output bias of a row,
        which is also multiplied by the weight. Backward recomputes all other values. During the computation, all
        values are in memory in float32."""
        hidden, ffn, routed = arch.hidden_size, arch.ffn_hidden_size, arch.experts_per_token
        gated = super().per_token(arch, element_bytes, fused=True)
        widened = 4 // element_bytes * 5 * ffn
        return PerToken(
            activation_bytes=gated.activation_bytes + routed * element_bytes * hidden,
            live_elements=gated.live_elements + routed * (widened + 2 * ffn + 2 * hidden),
            moved_elements=gated.moved_elements + routed * (2 * ffn + 2 * hidden),
        )


def unserved(arch: ArchitectureConfig, conditions: Served) -> str:
    """Return the reason: SGLang's loader (srt/models/gpt_oss.py) requires all experts of a layer at once, as in
    files."""
    why = "" if conditions.on_cuda else ", and its attention backends for CPUs do not support sinks"
    return f"loads the experts of a layer as one tensor, but weights are sent expert by expert{why}"


FAMILY = Family(
    "gpt_oss",
    reads=(stored_decoder, window_by_layer_types, experts),
    blocks=(SinkAttention(), QueryKeyValueBiases(), BiasedExperts()),
    unserved=unserved,
    adapted=False,
)
