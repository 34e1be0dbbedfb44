"""FLOPs of a sample, and FLOPs per token of the layers and of the head of a model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megappo.families.adapters import LoraShape, multiplied_adapters
from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import multiplied_parameters
from megappo.observe.timing.throughput import training_flops_per_token


def forward_flops(arch: ArchitectureConfig, sequence_tokens: float, *, is_critic: bool) -> tuple[float, float, float]:
    """Return forward FLOPs: per token of one layer, per token of its attention kernel, and per response token of the
    head.

    The count is one third of `training_flops_per_token` (Chowdhery et al. 2022, appendix B). A weight costs 2 FLOPs.
    Scores and their product with the values cost 4 heads head_dim T, where T is the length of the longest sequence.
    The causal mask does not reduce this cost. The FLOPs of the attention kernel are part of those of the layer. An
    embedding lookup costs nothing.

    In models with linear attention or wide attention, the results are means over all layers. Values of latent
    attention count with the width of queries, because the kernel pads them to this width.
    """
    head = arch.vocab_size * arch.hidden_size
    layers = multiplied_parameters(arch) - head
    attending, heads, width = len(arch.attention_layers), arch.heads, arch.mean_head_dim
    trunk, attention = (
        training_flops_per_token(n, layers=attending, heads=heads, head_dim=width, sequence_tokens=sequence_tokens) / 3
        for n in (layers, 0)
    )
    trunk += recurrence_flops(arch)
    return trunk / arch.layers, attention / arch.layers, 2.0 * (arch.hidden_size if is_critic else head)


def recurrence_flops(arch: ArchitectureConfig) -> float:
    """Return the forward FLOPs per token of linear attention in all layers, without its matrices."""
    return 0.0 if arch.delta_net is None else len(arch.linear_layers) * arch.delta_net.token_flops


def update_flops(
    arch: ArchitectureConfig,
    sequence_tokens: float,
    *,
    is_critic: bool,
    recompute: str = "none",
    recompute_modules: Collection[str] = (),
    lora: LoraShape | None = None,
) -> tuple[float, float]:
    """Return the forward and backward FLOPs per token of one layer, and per response token of the head.

    Backward costs two forward passes. Full recomputation costs one more forward pass. Selective recomputation costs
    the forward pass of the recomputed modules. The head of a language model computes its logits twice. With
    adapters, the other weights and the head have no gradients, so their backward pass costs one forward pass.
    """
    layer, attention, head = forward_flops(arch, sequence_tokens, is_critic=is_critic)
    width = arch.ffn_hidden_size * (arch.experts_per_token or 1) + arch.shared_ffn_hidden_size
    mlp = 2.0 * 3 * arch.hidden_size * width
    of = {"core_attn": attention, "mlp": mlp, "moe": mlp}  # an MLP has three matrices
    again = {"none": 0.0, "selective": sum(of[module] for module in set(recompute_modules)), "full": layer}
    scores = attention if arch.extensions.attends_by_products else 0.0  # made again in backward
    scores += recurrence_flops(arch) / arch.layers  # as is the recurrence of linear attention
    extra = 0.0 if is_critic else head
    if lora is None:
        return 3 * layer + again[recompute] + scores, 3 * head + extra
    added = adapter_flops(arch, lora)
    again["full"] += added
    in_layer = 2 * (layer - attention) + 3 * (attention + added) + again[recompute] + scores
    return in_layer, (3 if is_critic else 2) * head + extra


def adapter_flops(arch: ArchitectureConfig, lora: LoraShape | None) -> float:
    """Return the forward FLOPs per token of the adapters of one layer."""
    return 0.0 if lora is None else 2.0 * multiplied_adapters(arch, lora) / arch.layers


@dataclass(frozen=True)
class SampleCost:
    """Cost of a sample in FLOPs, as a function of its length.

    Microbatches with equal numbers of tokens differ in cost. A microbatch with a single long sample is the slowest.
    """

    of_token: int
    of_pair: int
    window: int | None = None
    """Size of the attention window in tokens, including the token itself. None: causal attention without a window."""
    of_far_pair: int = 0
    """FLOPs of a pair of tokens in the layers without a window, if other layers have a window."""

    def of(self, tokens: int) -> int:
        """Return the FLOPs of a sample with `tokens` tokens and causal attention."""
        seen = tokens if self.window is None else min(tokens, self.window)
        pairs = seen * (seen + 1) // 2 + (tokens - seen) * seen
        every = tokens * (tokens + 1) // 2
        return tokens * self.of_token + pairs * self.of_pair + every * self.of_far_pair


def sample_cost(arch: ArchitectureConfig, *, is_critic: bool) -> SampleCost:
    """Return the cost of forward and backward (Chowdhery et al. 2022, appendix B; the causal mask halves the cost).

    The output matrix of a policy counts for every token, although prompt tokens do not pass through it. A critic has
    no output matrix.
    """
    head = arch.vocab_size * arch.hidden_size if is_critic else 0
    windowed = arch.windowed_layers or (True,) * arch.layers  # without a window, all pairs are near
    of_pair, of_far_pair = (
        sum(12 * arch.heads * arch.head_dim_of(layer) for layer in arch.attention_layers if windowed[layer] == near)
        for near in (True, False)
    )
    of_token = 6 * (multiplied_parameters(arch) - head) + round(4 * recurrence_flops(arch))
    return SampleCost(of_token, of_pair, arch.sliding_window, of_far_pair)
