"""The architecture of a model as the trainer needs it, in one form for every family."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from megappo.families.rope import rotary_scales

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megappo.families.declaration import Family


DELTA_CHUNK = 64
"""Tokens of a chunk of the gated delta rule, for which one triangular system is solved; the default `chunk_size` of
transformers 5.19 (modeling_qwen3_next.py)."""


@dataclass(frozen=True)
class DeltaNet:
    """Layers with linear attention by the gated delta rule."""

    layers: tuple[int, ...]
    """Layers that have it in the place of attention."""
    key_heads: int
    value_heads: int
    """Value heads; a multiple of the key heads."""
    key_dim: int
    """Channels of a head's query and key."""
    value_dim: int
    """Channels of a head's value."""
    conv_width: int
    """Width of the causal convolution before the recurrence, in tokens."""

    @property
    def key_width(self) -> int:
        """Channels of a token's keys over all heads, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Channels of a token's values over all heads."""
        return self.value_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """Elements of a layer's state, which has the same size for sequences of any length."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def token_flops(self) -> float:
        """FLOPs of a token in the recurrence of one layer, forward: the products of a chunk's queries and keys with its
        keys, its triangular system, what its tokens read of each other, and what they expect of the state, read and
        write."""
        sums = 2 * self.key_dim * DELTA_CHUNK * 2 * self.key_heads
        of_head = DELTA_CHUNK * (self.key_dim + self.value_dim) + 2 * DELTA_CHUNK * self.value_dim
        return float(sums + self.value_heads * (of_head + 6 * self.key_dim * self.value_dim))


@dataclass(frozen=True)
class LatentAttention:
    """Attention whose keys and values are computed from a few numbers of each token (DeepSeek-AI 2024,
    arXiv:2405.04434, section 2.1): a latent, and a rotated key that all heads share."""

    query_rank: int | None
    """Size of the latent from which queries are computed; None: they are computed from the hidden state."""
    rank: int
    """Size of the latent from which keys and values are computed."""
    plain_dim: int
    """First channels of a head's query and key, which are not rotated."""
    rotary_dim: int
    """Rotated channels; those of the key are the same in all heads."""
    value_dim: int
    """Channels of a head's value."""
    interleaved: bool
    """Whether channels 2 i and 2 i + 1 are rotated together; otherwise i and i + half of them."""

    @property
    def token_width(self) -> int:
        """Numbers of a token from which its keys and values in all heads follow."""
        return self.rank + self.rotary_dim

    @property
    def made_dim(self) -> int:
        """Channels of a head that are computed from the latent of keys and values."""
        return self.plain_dim + self.value_dim


@dataclass(frozen=True)
class WideAttention:
    """Layers of attention with a head size of their own, whose keys, before their norm, are also their values."""

    layers: tuple[int, ...]
    head_dim: int
    kv_heads: int
    """Key/value heads."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model on which layouts and batches depend."""

    family: str
    """`model_type` of config.json."""
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    """Hidden size of the MLP, or of each expert where there are experts."""
    vocab_size: int
    """Rows of the embedding, before padding for tensor parallelism."""
    max_position_embeddings: int
    """Tokens of the longest sequence."""
    tied_embeddings: bool
    experts: int = field(default=0, kw_only=True)
    """Number of experts of each layer with experts; 0: a dense model."""
    dense_layers: int = field(default=0, kw_only=True)
    """Number of first layers that have an MLP in the place of experts; 0: all layers are alike."""
    dense_ffn_hidden_size: int = field(default=0, kw_only=True)
    """Hidden size of the MLP of `dense_layers`."""
    shared_ffn_hidden_size: int = field(default=0, kw_only=True)
    """Hidden size of the shared expert, which every token passes; 0: there is none."""
    delta_net: DeltaNet | None = field(default=None, kw_only=True)
    """Layers with linear attention; None: all layers have attention."""
    latent: LatentAttention | None = field(default=None, kw_only=True)
    """Latent attention; None: keys and values are computed from the hidden state by matrices."""
    wide_attention: WideAttention | None = field(default=None, kw_only=True)
    """Layers whose heads differ from `head_dim` and `kv_heads`; None: there are none."""

    @property
    def query_width(self) -> int:
        """Channels of a token's queries over all heads, except in layers of wide attention."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Channels of a token's keys over all heads, and of its values, except in layers of wide attention."""
        return self.kv_heads * self.head_dim

    def kv_heads_of(self, layer: int | None) -> int:
        """Key/value heads of a layer."""
        wide = self.wide_attention
        return wide.kv_heads if wide is not None and layer in wide.layers else self.kv_heads

    def head_dim_of(self, layer: int) -> int:
        """Channels of a layer's heads."""
        wide = self.wide_attention
        return wide.head_dim if wide is not None and layer in wide.layers else self.head_dim

    @cached_property
    def mean_head_dim(self) -> float:
        """Channels of a head, as the mean of all layers with attention."""
        return sum(map(self.head_dim_of, self.attention_layers)) / len(self.attention_layers)

    @property
    def mean_query_width(self) -> float:
        """Channels of a token's queries, as the mean of all layers with attention."""
        return self.heads * self.mean_head_dim

    @cached_property
    def key_widths(self) -> tuple[int, ...]:
        """Channels of a token's keys in each layer with attention, and of its values."""
        return tuple(self.kv_heads_of(layer) * self.head_dim_of(layer) for layer in self.attention_layers)

    @property
    def mean_key_width(self) -> float:
        """The mean of `key_widths`."""
        return sum(self.key_widths) / len(self.key_widths)

    @property
    def cached_width(self) -> int:
        """Numbers that an engine caches of a token in all layers with attention: keys and values of all heads, or the
        latents that they follow from."""
        if self.latent is not None:
            return len(self.attention_layers) * self.latent.token_width
        return 2 * sum(self.key_widths)

    @property
    def multiplied_head_dim(self) -> float:
        """Channels of a head in the products of two tokens, as the mean of query and value."""
        return self.mean_head_dim if self.latent is None else (self.head_dim + self.latent.value_dim) / 2

    @property
    def shared_sizes(self) -> dict[str, int]:
        """Sizes that tensor parallel ranks divide evenly, by their names in sentences. An expert is whole on its
        ranks."""
        sizes = {"heads": self.heads, "KV heads": self.kv_heads}
        if self.wide_attention is not None:
            sizes["KV heads of full attention"] = self.wide_attention.kv_heads
        if self.delta_net is not None:
            sizes["key heads of linear attention"] = self.delta_net.key_heads
        if not self.experts:
            return sizes | {"FFN hidden size": self.ffn_hidden_size}
        beside = {
            "dense FFN hidden size": self.dense_ffn_hidden_size,
            "shared expert's FFN hidden size": self.shared_ffn_hidden_size,
        }
        return sizes | {name: size for name, size in beside.items() if size}

    @property
    def expert_layers(self) -> range:
        """The layers that have experts."""
        return range(self.dense_layers if self.experts else self.layers, self.layers)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers with linear attention, whose state does not grow with a sequence."""
        return () if self.delta_net is None else self.delta_net.layers

    @property
    def special_layers(self) -> tuple[int, ...]:
        """The layers that differ from the others, which are alike: dense ones before those with experts, or those with
        linear or wide attention."""
        wide = self.wide_attention
        return self.linear_layers or (tuple(range(self.dense_layers)) if wide is None else wide.layers)

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers in which tokens attend to those before them."""
        return tuple(n for n in range(self.layers) if n not in self.linear_layers)


LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of latents, whatever `rms_norm_eps` is: transformers' DeepseekV3RMSNorm has it by default
there."""
PRODUCT_ROWS = 256
"""Queries of a block where attention is made of plain products: only the scores of one block are in memory at once."""
SHORT_SEGMENT = 256
"""Longest segment, in tokens, for which a CPU computes attention in bfloat16 by plain products and keeps the softmax
for backward; torch's flash kernel catches up at about 512 (benchmarks/results/2026-11-23-update-cpu.md)."""


@dataclass(frozen=True)
class ArchitectureExtensions:
    """Properties of a model that Megatron-Core has no field for: megappo's own layers build it, not Transformer
    Engine's."""

    scores_cap: float | None = None
    """Cap of attention scores, which become cap * tanh(score / cap) before the softmax."""
    logits_cap: float | None = None
    """Cap of the logits, applied in the same way before the temperature."""
    embedding_scale: float = 1.0
    """Factor that embeddings are multiplied by."""
    norms_after: bool = False
    """Whether the outputs of attention and MLP pass a norm before they are added to the residual stream."""
    layer_scalars: bool = False
    """Whether a layer's output, its residual stream included, is multiplied by a number of the layer, which is not
    trained."""
    ropes: tuple[str, ...] = ()
    """Kind of rope of each layer, by its name in `rope_parameters`; empty: one rope for all layers."""
    sinks: bool = False
    """Whether each head has a learned score without a value that takes part in the softmax (Xiao et al. 2023,
    arXiv:2309.17453)."""

    @property
    def attends_by_products(self) -> bool:
        """Whether attention is made of plain products, because torch's attention supports neither caps nor sinks."""
        return self.scores_cap is not None or self.sinks


@dataclass(frozen=True)
class ArchitectureConfig(ModelShape):
    """A decoder as its `config.json` describes it, read by its family."""

    norm_eps: float
    initializer_range: float
    hf_config: PretrainedConfig = field(repr=False, compare=False)
    """Configuration of the plain model: without `quantization_config`, which says how the files were stored."""
    declaration: Family = field(repr=False, compare=False)
    """The family's declaration, of which the model is built."""
    sliding_window: int | None = None
    """Size of the attention window in tokens, the token itself included; None: tokens see all before them."""
    windowed_layers: tuple[bool, ...] = ()
    """Whether each layer has the window; empty: all layers have it."""
    score_width: int | None = None
    """Attention scores are divided by the square root of this; None: by that of the head size."""
    extensions: ArchitectureExtensions = ArchitectureExtensions()
    experts_per_token: int = 0
    """Experts that each token is sent to; 0: a dense model."""
    normalized_experts: bool = True
    """Whether the weights of a token's experts sum to 1 (`norm_topk_prob`)."""
    sigmoid_router: bool = False
    """Whether experts are chosen by the sigmoid of their logits plus a correction bias, and weighted by the sigmoids
    alone."""
    experts_scale: float = 1.0
    """Factor that the sum of a token's experts is multiplied by."""
    expert_groups: int = 1
    """Number of equal groups of neighbouring experts. A token first chooses groups, by the sum of the two largest
    scores of each."""
    groups_per_token: int = 1
    """Number of groups that a token chooses its experts from."""
    rotary_channels: int | None = None
    """First channels of a head, which are rotated; None: all of them."""
    stored_blocks: tuple[int, int] | None = field(default=None, compare=False)
    """Rows and columns of the blocks that share a scale where the files hold float8 weights; None: plain weights."""
    stored_mxfp4: bool = field(default=False, compare=False)
    """Whether the files may hold the matrices of experts in MXFP4."""

    @property
    def has_window(self) -> bool:
        """Whether tokens see only a window of those before them."""
        return self.sliding_window is not None

    @property
    def is_standard(self) -> bool:
        """Whether Megatron-LM's arguments can describe the model."""
        special = self.sigmoid_router or self.latent is not None or self.special_layers != ()
        return not special and self.extensions == ArchitectureExtensions()

    @property
    def has_own_layers(self) -> bool:
        """Whether the model needs megappo's own layers; for others Transformer Engine's may be used, which take the
        angles of a rope and no factor on cosine and sine."""
        return not self.is_standard or any(scale != 1 for scale in rotary_scales(self))


def expert_number_bytes(experts: int) -> int:
    """Bytes of the smallest integer that can number each expert and has one more value for "none"."""
    return 1 if experts < 256 else 2


def padded_vocab_size(vocab_size: int, tp: int, multiple: int) -> int:
    """The vocabulary rounded up to `multiple`, or to a multiple of the tensor parallel size where that is 1."""
    step = multiple if multiple > 1 else tp
    return -(-vocab_size // step) * step
