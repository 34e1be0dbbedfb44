"""The one map between Hugging Face tensors and Megatron shards.

A Megatron parameter is, on every tensor parallel rank, a concatenation of slices of Hugging Face tensors. `pieces`
says which; loading reads the slices, streaming and export put them back. So there is one declaration per kind of
parameter, and load, weight sync and export cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megappo.architecture import ArchitectureConfig

Kind = Literal["replicated", "stacked", "row", "glu", "qkv", "vocab"]


@dataclass(frozen=True)
class Piece:
    """Rows (dim 0) or columns (dim 1) `start:stop` of a Hugging Face tensor."""

    name: str
    dim: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Rows or columns in the piece."""
        return self.stop - self.start


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    `megatron` is the name within a model chunk, with the global layer number in place of `{layer}`.
    """

    megatron: str
    hf: tuple[str, ...]
    kind: Kind
    layer: int | None = None
    """Global layer number; None for embedding, final norm and output layer."""
    expert: int | None = None
    """Global number of the expert it belongs to; None for what every token passes. An expert is whole on the ranks that
    hold it (`replicated`, `stacked`): tensor parallel ranks share out experts, not their matrices."""


OUTPUT_LAYER = "output_layer.weight"

# (Megatron name, Hugging Face names, kind), under the names that the parameters have in Megatron's own layers.
_LAYER: tuple[tuple[str, tuple[str, ...], Kind], ...] = (
    ("input_layernorm.weight", ("input_layernorm.weight",), "replicated"),
    (
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv",
    ),
    ("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "row"),
    ("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "replicated"),
)
_MLP: tuple[tuple[str, tuple[str, ...], Kind], ...] = (
    ("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "glu"),
    ("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "row"),
)
_ROUTER: tuple[tuple[str, tuple[str, ...], Kind], ...] = (("mlp.router.weight", ("mlp.gate.weight",), "replicated"),)
_EXPERT: tuple[tuple[str, tuple[str, ...], Kind], ...] = (
    (
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        "stacked",
    ),
    (
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        ("mlp.experts.{expert}.down_proj.weight",),
        "replicated",
    ),
)
_QKV_BIAS: tuple[tuple[str, tuple[str, ...], Kind], ...] = (
    (
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "qkv",
    ),
)
_QK_NORM: tuple[tuple[str, tuple[str, ...], Kind], ...] = (
    ("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "replicated"),
    ("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "replicated"),
)
_ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Within a layer: Transformer Engine fuses a norm into the linear layer behind it."""


def canonical_name(in_layer: str) -> str:
    """The one name that the map, checkpoints, streams and exports know a layer's parameter by."""
    return _ALIASES.get(in_layer, in_layer)


def model_parameters(arch: ArchitectureConfig, *, experts: Iterable[int] | None = None) -> Iterator[Parameter]:
    """Every parameter of a causal language model of this architecture, in Hugging Face's order.

    With tied embeddings the output layer is not listed: it is the embedding. `experts`: only these of each layer.
    """
    chosen = tuple(experts) if experts is not None else range(arch.experts)
    yield Parameter("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")
    rows = _LAYER + (_ROUTER if arch.experts else _MLP)
    rows += (_QKV_BIAS if arch.qkv_bias else ()) + (_QK_NORM if arch.qk_norm else ())
    for layer in range(arch.layers):
        for megatron, hf, kind in rows:
            yield _in_layer(layer, megatron, hf, kind)
        for expert in chosen:
            for megatron, hf, kind in _EXPERT:
                its = tuple(h.format(expert=expert) for h in hf)
                yield _in_layer(layer, megatron.format(expert=expert), its, kind, expert)
    yield Parameter("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated")
    if not arch.tied_embeddings:
        yield Parameter(OUTPUT_LAYER, ("lm_head.weight",), "vocab")


def _in_layer(layer: int, megatron: str, hf: tuple[str, ...], kind: Kind, expert: int | None = None) -> Parameter:
    names = tuple(f"model.layers.{layer}.{name}" for name in hf)
    return Parameter(f"decoder.layers.{layer}.{megatron}", names, kind, layer, expert)


def hf_shape(arch: ArchitectureConfig, name: str) -> tuple[int, ...]:
    """Shape of a Hugging Face tensor of this architecture."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (arch.vocab_size, arch.hidden_size),
        "lm_head.weight": (arch.vocab_size, arch.hidden_size),
        "q_proj.weight": (q, arch.hidden_size),
        "k_proj.weight": (kv, arch.hidden_size),
        "v_proj.weight": (kv, arch.hidden_size),
        "o_proj.weight": (arch.hidden_size, q),
        "q_proj.bias": (q,),
        "k_proj.bias": (kv,),
        "v_proj.bias": (kv,),
        "q_norm.weight": (arch.head_dim,),
        "k_norm.weight": (arch.head_dim,),
        "gate.weight": (arch.experts, arch.hidden_size),
        "gate_proj.weight": (arch.ffn_hidden_size, arch.hidden_size),
        "up_proj.weight": (arch.ffn_hidden_size, arch.hidden_size),
        "down_proj.weight": (arch.hidden_size, arch.ffn_hidden_size),
    }
    # What is left are the norms over the hidden size.
    return shapes.get(".".join(name.split(".")[-2:]), (arch.hidden_size,))


def multiplied_parameters(arch: ArchitectureConfig) -> int:
    """Weights that a token is multiplied with: all but an input embedding of its own and the experts it misses."""
    active = model_parameters(arch, experts=range(arch.experts_per_token))
    names = [name for parameter in active for name in parameter.hf]
    if not arch.tied_embeddings:
        names.remove("model.embed_tokens.weight")
    return sum(math.prod(hf_shape(arch, name)) for name in names)


def pieces(arch: ArchitectureConfig, parameter: Parameter, tensor_rank: int, tp: int, padded_vocab: int) -> list[Piece]:
    """The slices whose concatenation is the shard of `tensor_rank` out of `tp`.

    A `vocab` shard ends with rows of padding where its pieces hold fewer rows than padded_vocab / tp.
    """

    def share(name: str, dim: int, size: int) -> Piece:
        part = size // tp
        return Piece(name, dim, tensor_rank * part, (tensor_rank + 1) * part)

    names = parameter.hf
    if parameter.kind in ("replicated", "stacked"):
        return [Piece(name, 0, 0, hf_shape(arch, name)[0]) for name in names]
    if parameter.kind == "glu":
        return [share(name, 0, hf_shape(arch, name)[0]) for name in names]
    if parameter.kind == "row":
        return [share(names[0], 1, hf_shape(arch, names[0])[1])]
    if parameter.kind == "vocab":
        part = share(names[0], 0, padded_vocab)
        start, stop = min(part.start, arch.vocab_size), min(part.stop, arch.vocab_size)
        return [Piece(names[0], 0, start, stop)]
    return _qkv_pieces(arch, names, tensor_rank, tp)


def _qkv_pieces(arch: ArchitectureConfig, names: tuple[str, ...], tensor_rank: int, tp: int) -> list[Piece]:
    """Megatron interleaves by key/value group: the group's queries, its key, its value."""
    per_group = arch.heads // arch.kv_heads
    groups = arch.kv_heads // tp
    found = []
    for group in range(tensor_rank * groups, (tensor_rank + 1) * groups):
        for name, heads in zip(names, (per_group, 1, 1), strict=True):
            rows = heads * arch.head_dim
            found.append(Piece(name, 0, group * rows, (group + 1) * rows))
    return found


def shard_shape(arch: ArchitectureConfig, parameter: Parameter, tp: int, padded_vocab: int) -> torch.Size:
    """Shape of the parameter on one tensor parallel rank."""
    if parameter.kind == "vocab":
        return torch.Size((padded_vocab // tp, arch.hidden_size))
    slices = pieces(arch, parameter, 0, tp, padded_vocab)
    shape = list(hf_shape(arch, slices[0].name))
    shape[slices[0].dim] = sum(p.size for p in slices)
    return torch.Size(shape)


def expert_share(arch: ArchitectureConfig, parameter: Parameter, ep: int) -> int | None:
    """Which of the `ep` shares of the experts a parameter is in; None for what every token passes."""
    return None if parameter.expert is None else parameter.expert * ep // arch.experts


def scatter_shard(shard: Tensor, shard_pieces: list[Piece], into: dict[str, Tensor]) -> None:
    """Copy a shard back into the whole Hugging Face tensors `into`; rows of padding are dropped."""
    offset = 0
    for piece in shard_pieces:
        source = shard.narrow(piece.dim, offset, piece.size)
        into[piece.name].narrow(piece.dim, piece.start, piece.size).copy_(source)
        offset += piece.size


def assemble_shard(parts: list[Tensor], shard_pieces: list[Piece], shape: torch.Size) -> Tensor:
    """Concatenate the slices of a shard and fill up with zero rows to `shape` (padded vocabulary)."""
    dim = shard_pieces[0].dim
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    missing = shape[0] - whole.shape[0]
    return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]) if missing else whole
