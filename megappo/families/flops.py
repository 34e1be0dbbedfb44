"""FLOPs of a model: of a sample, and per token of its layers and of its head."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megappo.families.adapters import LoraShape, multiplied_adapters
from megappo.families.architecture import ArchitectureConfig
from megappo.families.parameters import multiplied_parameters
from megappo.observe.throughput import training_flops_per_token


def forward_flops(arch: ArchitectureConfig, sequence_tokens: float, *, is_critic: bool) -> tuple[float, float, float]:
    """FLOPs forward per token in one layer and, of those, in the attention kernel; per response token in the head.

    A third of `training_flops_per_token` (Chowdhery et al. 2022, appendix B): two per weight, 4 heads head_dim T for
    the scores and their product with the values, T the longest sequence, the causal mask not discounted. An embedding
    is looked up and costs none. Where some layers have linear attention, or wider heads, these are means over all
    layers. Values of latent attention count as wide as queries, since they are multiplied at that width.
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
    """FLOPs forward per token of linear attention in all layers, besides its matrices."""
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
    """FLOPs forward and backward per token in one layer, and per response token in the head.

    Backward is two forward passes; full recomputation adds one, selective that of its modules. A language model's head
    computes its logits twice. Weights under adapters have no gradient, the head's included: backward is one forward
    pass of theirs.
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
    """FLOPs forward per token in the adapters of one layer."""
    return 0.0 if lora is None else 2.0 * multiplied_adapters(arch, lora) / arch.layers


@dataclass(frozen=True)
class SampleCost:
    """Cost of a sample in FLOPs, of its tokens and of the pairs of tokens that attend to each other.

    In microbatches of equal tokens the one that holds a single long sample takes longest.
    """

    of_token: int
    of_pair: int
    window: int | None = None
    """Size of the attention window in tokens, the token itself included; None: tokens see all before them."""
    of_far_pair: int = 0
    """FLOPs of a pair in layers without the window, where others have it."""

    def of(self, tokens: int) -> int:
        """FLOPs of a sample of `tokens`, each of which sees itself and those before it."""
        seen = tokens if self.window is None else min(tokens, self.window)
        pairs = seen * (seen + 1) // 2 + (tokens - seen) * seen
        every = tokens * (tokens + 1) // 2
        return tokens * self.of_token + pairs * self.of_pair + every * self.of_far_pair


def sample_cost(arch: ArchitectureConfig, *, is_critic: bool) -> SampleCost:
    """Cost of forward and backward (Chowdhery et al. 2022, appendix B, with the causal mask discounted).

    A policy's output matrix counts for every token, though a prompt does not pass it; a critic has none.
    """
    head = arch.vocab_size * arch.hidden_size if is_critic else 0
    windowed = arch.windowed_layers or (True,) * arch.layers  # all tokens are near where there is no window
    of_pair, of_far_pair = (
        sum(12 * arch.heads * arch.head_dim_of(layer) for layer in arch.attention_layers if windowed[layer] == near)
        for near in (True, False)
    )
    of_token = 6 * (multiplied_parameters(arch) - head) + round(4 * recurrence_flops(arch))
    return SampleCost(of_token, of_pair, arch.sliding_window, of_far_pair)
