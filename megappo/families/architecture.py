"""What the trainer needs to know of a model, in one form for every family."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megappo.families.declaration import Family


DELTA_CHUNK = 64
"""Tokens of a chunk of the gated delta rule, for which one triangular system is solved; transformers and the kernels of
others have as many."""


@dataclass(frozen=True)
class DeltaNet:
    """Layers of linear attention by the gated delta rule."""

    layers: tuple[int, ...]
    """Those that have it in the place of attention."""
    key_heads: int
    value_heads: int
    """As many for each key head."""
    key_dim: int
    """Channels of a head's query and key."""
    value_dim: int
    """Channels of a head's value."""
    conv_width: int
    """Tokens that the convolution before it sees."""

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
        """Numbers of a layer's state, of a sequence of any length."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def token_flops(self) -> float:
        """Of a token in the recurrence of one layer, forward: products of a chunk's queries and keys with its keys, its
        triangular system, what its tokens read of each other; and what they expect and read of the state, and write."""
        sums = 2 * self.key_dim * DELTA_CHUNK * 2 * self.key_heads
        of_head = DELTA_CHUNK * (self.key_dim + self.value_dim) + 2 * DELTA_CHUNK * self.value_dim
        return float(sums + self.value_heads * (of_head + 6 * self.key_dim * self.value_dim))


@dataclass(frozen=True)
class LatentAttention:
    """Attention whose keys and values are made of a few numbers for each token (DeepSeek-AI 2024, arXiv:2405.04434,
    section 2.1): a latent, and a key with positions that all heads share."""

    query_rank: int | None
    """Numbers of the latent that queries are made of; None: they are made of the hidden state."""
    rank: int
    """Numbers of the latent that keys and values are made of."""
    plain_dim: int
    """Channels of a head's query and key that are not rotated, its first ones."""
    rotary_dim: int
    """Those that are, of which the key's are the same in all heads."""
    value_dim: int
    """Channels of a head's value."""
    interleaved: bool
    """Channels 2 i and 2 i + 1 are turned together; otherwise i and i + half of them."""

    @property
    def token_width(self) -> int:
        """Numbers of a token that are enough for its keys and values in all heads."""
        return self.rank + self.rotary_dim

    @property
    def made_dim(self) -> int:
        """Channels of a head that are made of the latent."""
        return self.plain_dim + self.value_dim


@dataclass(frozen=True)
class WideAttention:
    """Layers of attention whose heads have a size of their own, and whose keys, before their norm, are their values."""

    layers: tuple[int, ...]
    head_dim: int
    kv_heads: int
    """Key/value heads."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes that layouts and batches depend on."""

    family: str
    """`model_type` of config.json."""
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    """Of the MLP, or of each expert where there are experts."""
    vocab_size: int
    """Rows of the embedding, before padding for tensor parallelism."""
    max_position_embeddings: int
    """Tokens of the longest sequence."""
    tied_embeddings: bool
    experts: int = field(default=0, kw_only=True)
    """Experts of each layer that has some; 0: a dense model."""
    dense_layers: int = field(default=0, kw_only=True)
    """The first layers, which have an MLP in place of experts; 0 where all layers are alike."""
    dense_ffn_hidden_size: int = field(default=0, kw_only=True)
    """Of their MLP."""
    shared_ffn_hidden_size: int = field(default=0, kw_only=True)
    """Of the expert that every token passes beside those it is sent to; 0: there is none."""
    delta_net: DeltaNet | None = field(default=None, kw_only=True)
    """Of layers with linear attention; None: all layers have attention."""
    latent: LatentAttention | None = field(default=None, kw_only=True)
    """Of attention whose keys and values are made of a latent; None: matrices make them of the hidden state."""
    wide_attention: WideAttention | None = field(default=None, kw_only=True)
    """Of layers whose heads differ from `head_dim` and `kv_heads`; None: there are none."""

    @property
    def query_width(self) -> int:
        """Channels of a token's queries over all heads, but in layers of wide attention."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Channels of a token's keys over all heads, and of its values, but in layers of wide attention."""
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
        """The mean of these."""
        return sum(self.key_widths) / len(self.key_widths)

    @property
    def cached_width(self) -> int:
        """Numbers that an engine keeps of a token in all layers with attention: keys and values of all heads, or what
        they are made of."""
        if self.latent is not None:
            return len(self.attention_layers) * self.latent.token_width
        return 2 * sum(self.key_widths)

    @property
    def multiplied_head_dim(self) -> float:
        """Channels of a head that two tokens multiply, mean of query and value."""
        return self.mean_head_dim if self.latent is None else (self.head_dim + self.latent.value_dim) / 2

    @property
    def shared_sizes(self) -> dict[str, int]:
        """What tensor parallel ranks share out evenly, by its name in sentences; an expert is whole on its ranks."""
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
        """The layers that are unlike all others, which are alike: dense ones before those with experts, or those with
        linear or wide attention."""
        wide = self.wide_attention
        return self.linear_layers or (tuple(range(self.dense_layers)) if wide is None else wide.layers)

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers in which tokens attend to those before them."""
        return tuple(n for n in range(self.layers) if n not in self.linear_layers)


LATENT_NORM_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` says of the others."""
PRODUCT_ROWS = 256
"""Queries whose attention scores are there at once, where attention is made of plain products."""
SHORT_SEGMENT = 256
"""Tokens of the longest segment that a CPU attends to by plain products in bfloat16, which keep scores' shares; torch's
flash kernel catches up at about 512."""


@dataclass(frozen=True)
class Beyond:
    """What a model has that Megatron-Core has no field for: megappo's own layers build it, not Transformer Engine's."""

    scores_cap: float | None = None
    """Attention scores become cap * tanh(score / cap) before the softmax."""
    logits_cap: float | None = None
    """So do logits, before the temperature."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by it."""
    norms_after: bool = False
    """What attention and MLP add to the residual stream passes a norm first."""
    layer_scalars: bool = False
    """What a layer gives, its residual stream included, is multiplied by a number of its own, which is not trained."""
    ropes: tuple[str, ...] = ()
    """The kind of rope of each layer, by its name in `rope_parameters`; nothing: there is one rope for all."""
    sinks: bool = False
    """Each head has a learned score that takes part in the softmax, and no value (Xiao et al. 2023,
    arXiv:2309.17453)."""

    @property
    def attends_by_products(self) -> bool:
        """Attention is made of plain products, as torch's has no place for what is done with scores."""
        return self.scores_cap is not None or self.sinks


@dataclass(frozen=True)
class ArchitectureConfig(ModelShape):
    """A decoder as its `config.json` says, read by its family."""

    norm_eps: float
    initializer_range: float
    hf_config: PretrainedConfig = field(repr=False, compare=False)
    """Of the plain model: without `quantization_config`, which says how the files were stored."""
    declaration: Family = field(repr=False, compare=False)
    """What its parameters are and how it is built."""
    sliding_window: int | None = None
    """Tokens each token sees, itself included; None: all before it."""
    windowed_layers: tuple[bool, ...] = ()
    """Which layers have the window; nothing: all of them."""
    score_width: int | None = None
    """Attention scores are divided by the root of it; None: by that of a head's size."""
    beyond: Beyond = Beyond()
    experts_per_token: int = 0
    """Experts that each token is sent to; 0: a dense model."""
    normalized_experts: bool = True
    """The weights of a token's experts sum to 1 (`norm_topk_prob`)."""
    sigmoid_router: bool = False
    """Experts are chosen by the sigmoid of each logit plus a correction bias, and weighted by the sigmoids alone."""
    experts_scale: float = 1.0
    """The sum of a token's experts is multiplied by it."""
    expert_groups: int = 1
    """Equal groups of neighbouring experts, by the sum of whose two largest scores a token chooses some first."""
    groups_per_token: int = 1
    """Of which a token's experts are."""
    rotary_channels: int | None = None
    """Channels of a head that are rotated, its first ones; None: all of them."""
    stored_blocks: tuple[int, int] | None = field(default=None, compare=False)
    """Rows and columns of the blocks that share a scale where the files hold float8 weights; None: plain weights."""
    stored_mxfp4: bool = field(default=False, compare=False)
    """The files may hold the matrices of experts in MXFP4."""

    @property
    def has_window(self) -> bool:
        """Whether a token sees only the last of those before it."""
        return self.sliding_window is not None

    @property
    def has_own_layers(self) -> bool:
        """Whether megappo's own layers build it, where others may be Transformer Engine's."""
        special = self.sigmoid_router or self.latent is not None or self.special_layers != ()
        return special or self.beyond != Beyond()

    @property
    def layers_with_window(self) -> int:
        """How many of the layers have the window."""
        every = self.windowed_layers or (True,) * self.layers
        return sum(every) if self.has_window else 0


def expert_number_bytes(experts: int) -> int:
    """Bytes in which there is a number for each expert, and one for none."""
    return 1 if experts < 256 else 2


def padded_vocab_size(vocab_size: int, tp: int, multiple: int) -> int:
    """The vocabulary rounded up to `multiple`, or to a multiple of the tensor parallel size where that is 1."""
    step = multiple if multiple > 1 else tp
    return -(-vocab_size // step) * step
