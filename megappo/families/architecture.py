"""Sizes of a model in one form for all families, and properties without a setting in Megatron-Core."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

DELTA_CHUNK = 64
"""Tokens in a chunk of the gated delta rule. Each chunk requires the solution of one triangular system. The value is
the default `chunk_size` of transformers 5.19 (modeling_qwen3_next.py)."""


@dataclass(frozen=True)
class DeltaNet:
    """Layers with linear attention by the gated delta rule."""

    layers: tuple[int, ...]
    """Layers with linear attention instead of attention."""
    key_heads: int
    value_heads: int
    """Number of value heads, a multiple of `key_heads`."""
    key_dim: int
    """Channels of the query and key of a head."""
    value_dim: int
    """Channels of the value of a head."""
    conv_width: int
    """Width in tokens of the causal convolution before the recurrence."""

    @property
    def key_width(self) -> int:
        """Channels of a token's keys over all heads. Queries have the same number."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Channels of a token's values over all heads."""
        return self.value_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """Elements of the state of a layer. The size does not depend on the sequence length."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def token_flops(self) -> float:
        """Forward FLOPs of a token in the recurrence of one layer.

        The count includes the products of queries and keys with the keys of the chunk, the triangular system, the
        reads within the chunk, the prediction from the state, and the reads and writes of the state.
        """
        sums = 2 * self.key_dim * DELTA_CHUNK * 2 * self.key_heads
        of_head = DELTA_CHUNK * (self.key_dim + self.value_dim) + 2 * DELTA_CHUNK * self.value_dim
        return float(sums + self.value_heads * (of_head + 6 * self.key_dim * self.value_dim))


@dataclass(frozen=True)
class LatentAttention:
    """Attention with keys and values that are computed from small latents (DeepSeek-AI 2024, arXiv:2405.04434,
    section 2.1). The input of keys and values is a latent of each token, and a rotated key for all heads."""

    query_rank: int | None
    """Size of the latent of queries. None: queries are computed from the hidden state."""
    rank: int
    """Size of the latent of keys and values."""
    plain_dim: int
    """Number of channels without rotation. These are the first channels of a head's query and key."""
    rotary_dim: int
    """Number of rotated channels. All heads share the rotated channels of the key."""
    value_dim: int
    """Channels of the value of a head."""
    interleaved: bool
    """Whether rotation pairs channels 2 i and 2 i + 1; otherwise it pairs channels i and i + rotary_dim / 2."""

    @property
    def token_width(self) -> int:
        """Numbers per token that determine its keys and values in all heads."""
        return self.rank + self.rotary_dim

    @property
    def made_dim(self) -> int:
        """Channels per head that are computed from the latent of keys and values."""
        return self.plain_dim + self.value_dim


@dataclass(frozen=True)
class WideAttention:
    """Attention layers with a different head size. Their keys before the norm are also their values."""

    layers: tuple[int, ...]
    head_dim: int
    kv_heads: int
    """Number of key/value heads."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model that determine layouts and batches."""

    family: str
    """`model_type` of config.json."""
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    """Hidden size of the MLP, or of each expert in models with experts."""
    vocab_size: int
    """Rows of the embedding without padding for tensor parallelism."""
    max_position_embeddings: int
    """Length of the longest sequence in tokens."""
    tied_embeddings: bool
    experts: int = field(default=0, kw_only=True)
    """Number of experts in each layer with experts. 0: a dense model."""
    dense_layers: int = field(default=0, kw_only=True)
    """Number of first layers with an MLP instead of experts. 0: no such layers."""
    dense_ffn_hidden_size: int = field(default=0, kw_only=True)
    """Hidden size of the MLP of `dense_layers`."""
    shared_ffn_hidden_size: int = field(default=0, kw_only=True)
    """Hidden size of the shared expert, which processes every token. 0: no shared expert."""
    delta_net: DeltaNet | None = field(default=None, kw_only=True)
    """Layers with linear attention. None: all layers have attention."""
    latent: LatentAttention | None = field(default=None, kw_only=True)
    """Latent attention. None: matrices compute keys and values from the hidden state."""
    wide_attention: WideAttention | None = field(default=None, kw_only=True)
    """Layers with other values of `head_dim` and `kv_heads`. None: no such layers."""

    @property
    def query_width(self) -> int:
        """Channels of a token's queries over all heads, in layers without wide attention."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Channels of a token's keys over all heads, in layers without wide attention. Values have the same number."""
        return self.kv_heads * self.head_dim

    def kv_heads_of(self, layer: int | None) -> int:
        """Return the number of key/value heads of a layer."""
        wide = self.wide_attention
        return wide.kv_heads if wide is not None and layer in wide.layers else self.kv_heads

    def head_dim_of(self, layer: int) -> int:
        """Return the head size of a layer, in channels."""
        wide = self.wide_attention
        return wide.head_dim if wide is not None and layer in wide.layers else self.head_dim

    @cached_property
    def mean_head_dim(self) -> float:
        """Mean head size of all layers with attention, in channels."""
        return sum(map(self.head_dim_of, self.attention_layers)) / len(self.attention_layers)

    @property
    def mean_query_width(self) -> float:
        """Mean number of query channels per token, over all layers with attention."""
        return self.heads * self.mean_head_dim

    @cached_property
    def key_widths(self) -> tuple[int, ...]:
        """Channels of a token's keys in each layer with attention. Values have the same number."""
        return tuple(self.kv_heads_of(layer) * self.head_dim_of(layer) for layer in self.attention_layers)

    @property
    def mean_key_width(self) -> float:
        """Mean of `key_widths`."""
        return sum(self.key_widths) / len(self.key_widths)

    @property
    def cached_width(self) -> int:
        """Numbers per token in an engine's cache, over all layers with attention. The cache contains keys and values
        of all heads, or latents."""
        if self.latent is not None:
            return len(self.attention_layers) * self.latent.token_width
        return 2 * sum(self.key_widths)

    @property
    def multiplied_head_dim(self) -> float:
        """Mean of the query and value channels of a head, which determines the cost of attention per pair of tokens."""
        return self.mean_head_dim if self.latent is None else (self.head_dim + self.latent.value_dim) / 2

    @property
    def shared_sizes(self) -> dict[str, int]:
        """Sizes that the tensor parallel size must divide, by the names in error messages. Experts are stored whole,
        so their size is not included."""
        sizes = {"heads": self.heads, "KV heads": self.kv_heads}
        if self.wide_attention is not None:
            sizes["KV heads of full attention"] = self.wide_attention.kv_heads
        if self.delta_net is not None:
            sizes["key heads of linear attention"] = self.delta_net.key_heads
        if not self.experts:
            return sizes | {"FFN hidden size": self.ffn_hidden_size}
        mlp_sizes = {
            "dense FFN hidden size": self.dense_ffn_hidden_size,
            "shared expert's FFN hidden size": self.shared_ffn_hidden_size,
        }
        return sizes | {name: size for name, size in mlp_sizes.items() if size}

    @property
    def expert_layers(self) -> range:
        """Layers with experts."""
        return range(self.dense_layers if self.experts else self.layers, self.layers)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Layers with linear attention. Their state has a fixed size."""
        return () if self.delta_net is None else self.delta_net.layers

    @property
    def special_layers(self) -> tuple[int, ...]:
        """Layers with a special structure: dense layers before layers with experts, layers with linear attention, or
        layers with wide attention. All other layers are equal."""
        wide = self.wide_attention
        return self.linear_layers or (tuple(range(self.dense_layers)) if wide is None else wide.layers)

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with attention to previous tokens."""
        return tuple(n for n in range(self.layers) if n not in self.linear_layers)


LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of latents, independent of `rms_norm_eps`. The value is the default of transformers'
DeepseekV3RMSNorm."""
PRODUCT_ROWS = 256
"""Number of queries per block of attention by plain products. Only the scores of one block are in memory at a time."""
SHORT_SEGMENT = 256
"""Longest segment, in tokens, for which a CPU uses plain products for attention in bfloat16. Backward reuses the
softmax. torch's flash kernel becomes equally fast at about 512 tokens (benchmarks/results/2026-11-23-update-cpu.md)."""


@dataclass(frozen=True)
class ArchitectureExtensions:
    """Properties of a model without a setting in Megatron-Core. megappo's own layers implement the properties
    instead of Transformer Engine's layers."""

    scores_cap: float | None = None
    """Cap of attention scores. The score before the softmax is cap * tanh(score / cap). None: no cap."""
    logits_cap: float | None = None
    """Cap of the logits by the same formula, applied before the temperature. None: no cap."""
    embedding_scale: float = 1.0
    """Factor on embeddings."""
    norms_after: bool = False
    """Whether norms are applied to the outputs of attention and MLP before the residual addition."""
    layer_scalars: bool = False
    """Whether each layer multiplies its output, including the residual stream, by a scalar. The scalars are not
    trained."""
    ropes: tuple[str, ...] = ()
    """Rope of each layer, as a key of `rope_parameters`. Empty: one rope for all layers."""
    sinks: bool = False
    """Whether each head has an attention sink: a learned logit in the softmax without a value (Xiao et al. 2023,
    arXiv:2309.17453)."""

    @property
    def attends_by_products(self) -> bool:
        """Whether attention uses plain products, because torch's attention supports neither caps nor sinks."""
        return self.scores_cap is not None or self.sinks


STANDARD = ArchitectureExtensions()
"""No such properties."""


def expert_number_bytes(experts: int) -> int:
    """Return the bytes of the smallest integer type for expert numbers and one additional value for "none"."""
    return 1 if experts < 256 else 2


def padded_vocab_size(vocab_size: int, tp: int, multiple: int) -> int:
    """Round the vocabulary size up to a multiple of `multiple`. If `multiple` is 1, round up to a multiple of the
    tensor parallel size."""
    step = multiple if multiple > 1 else tp
    return -(-vocab_size // step) * step
