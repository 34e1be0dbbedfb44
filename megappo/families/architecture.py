"""What the trainer needs to know of a model, in one form for every family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megappo.families.declaration import Family


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

    @property
    def query_width(self) -> int:
        """Channels of a token's queries over all heads."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Channels of a token's keys over all heads, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def shared_sizes(self) -> dict[str, int]:
        """What tensor parallel ranks share out evenly, by its name in sentences; an expert is whole on its ranks."""
        sizes = {"heads": self.heads, "KV heads": self.kv_heads}
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


CAPPED_ROWS = 256
"""Queries whose capped attention scores are there at once."""
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
    ropes: tuple[str, ...] = ()
    """The kind of rope of each layer, by its name in `rope_parameters`; nothing: there is one rope for all."""


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
    rotary_channels: int | None = None
    """Channels of a head that are rotated, its first ones; None: all of them."""
    stored_blocks: tuple[int, int] | None = field(default=None, compare=False)
    """Rows and columns of the blocks that share a scale where the files hold float8 weights; None: plain weights."""

    @property
    def has_window(self) -> bool:
        """Whether a token sees only the last of those before it."""
        return self.sliding_window is not None

    @property
    def has_own_layers(self) -> bool:
        """Whether megappo's own layers build it, where others may be Transformer Engine's."""
        return self.beyond != Beyond() or self.dense_layers > 0 or self.sigmoid_router

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
