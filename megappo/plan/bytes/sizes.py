"""Numbers of weights, counted from the map that loads the weights, and the format of byte counts."""

from __future__ import annotations

import math
from functools import lru_cache

from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import expert_parameters, model_parameters, multiplied_parameters, shard_shape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@lru_cache(maxsize=64)
def model_sizes(arch: ArchitectureConfig) -> tuple[int, int, int]:
    """Return the number of all weights of the Hugging Face model, of the weights of its layers, and of its output
    matrix."""
    total = sum(p.elements for p in model_parameters(arch, experts=()))
    total += len(arch.expert_layers) * arch.experts * expert_parameters(arch)
    head = arch.vocab_size * arch.hidden_size
    return total, multiplied_parameters(arch) - head, head


@lru_cache(maxsize=64)
def largest_tensor(arch: ArchitectureConfig) -> int:
    """Return the number of elements of the largest whole Megatron parameter. The weight stream sends at least this
    parameter at once."""
    return max(p.elements for p in model_parameters(arch, experts=(0,)))


@lru_cache(maxsize=64)
def whole_parameters(arch: ArchitectureConfig) -> int:
    """Return the number of weights that are not sharded by tensor parallelism: norms and routers."""
    return sum(p.elements for p in model_parameters(arch, experts=()) if p.axis is None)


@lru_cache(maxsize=256)
def largest_of_layer(arch: ArchitectureConfig, tp: int, experts_per_rank: int) -> int:
    """Return the number of elements of the largest weight of a layer on one tensor parallel rank. The experts of a
    rank in a layer count as one weight."""
    parameters = [p for p in model_parameters(arch, experts=(0,)) if p.layer in (0, arch.layers - 1)]
    shapes = [shard_shape(arch, p, tp, arch.vocab_size) for p in parameters]
    counts = [1 if p.expert is None else experts_per_rank for p in parameters]
    return max(n * math.prod(shape) for n, shape in zip(counts, shapes, strict=True))


def state_bytes(arch: ArchitectureConfig, element_bytes: int) -> float:
    """Return the bytes that an engine stores per sequence in layers of linear attention. The size does not depend on
    the sequence length. The bytes are states in float32 and the inputs that the convolutions of the next tokens need.
    """
    net = arch.delta_net
    if net is None:
        return 0.0
    convolved = net.conv_width * (2 * net.key_width + net.value_width)
    return float(len(net.layers) * (4 * net.state_elements + element_bytes * convolved))


def generation_flops_of_pair(arch: ArchitectureConfig, *, served: bool) -> float:
    """Return the FLOPs of attention in all layers between a generated token and one earlier token. The FLOPs include
    the scores and the weighted values.

    With latent attention, the embedded engine expands keys and values from the latents again for each generated token.
    Servers multiply queries and outputs by the expansion matrices instead (DeepSeek-AI 2024, arXiv:2405.04434, section
    2.1.2).
    """
    layers, net = len(arch.attention_layers), arch.latent
    if net is None:
        return 4.0 * layers * arch.mean_query_width
    if served:
        return 2.0 * layers * arch.heads * (net.token_width + net.rank)
    return 2.0 * layers * arch.heads * (arch.head_dim + net.value_dim + net.rank * net.made_dim)


@lru_cache(maxsize=64)
def attention_parameters(arch: ArchitectureConfig) -> int:
    """Return the number of weights that are sharded over the ranks of one attention group (attention of all layers and
    the embedding), if ranks attend in groups."""
    parameters = (p for p in model_parameters(arch, experts=()) if p.is_of_attention and p.axis is not None)
    return sum(p.elements for p in parameters)


def format_size(n_bytes: float) -> str:
    """Return a size as text, such as `1.5 GB` or `20.0 MB`."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
