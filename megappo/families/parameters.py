"""The one map between Hugging Face tensors and Megatron shards.

A Megatron parameter is, on every tensor parallel rank, a concatenation of slices of Hugging Face tensors. `pieces`
says which; loading reads the slices, streaming and export put them back. So there is one declaration per parameter,
that of its family, and load, weight sync and export cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from megappo.families.architecture import ArchitectureConfig
from megappo.families.declaration import Drawn, Kind, Shape, Weight

_AXES: dict[Kind, int] = {"column": 0, "qkv": 0, "grouped": 0, "vocab": 0, "row": 1}
EMBEDDING, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"
HF_EMBEDDING, HF_OUTPUT_LAYER = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Piece:
    """Slice of a Hugging Face tensor: rows (dim 0) or columns (dim 1) `start:stop`."""

    name: str
    dim: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of rows or columns."""
        return self.stop - self.start


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter and the Hugging Face tensors it is made of; see `Weight`."""

    megatron: str
    """Name within the model; layers and experts are numbered over all ranks."""
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    """Shape of each of the Hugging Face tensors, in the order of their names."""
    kind: Kind
    fused: str = ""
    packed: str = ""
    interleaved: bool = False
    """See `Weight`."""
    layer: int | None = None
    """Global layer number; None for embedding, final norm and output layer."""
    wide: bool = False
    """See `Weight`."""
    sections: tuple[tuple[int, ...], ...] = ()
    """See `Weight`."""
    drawn: Drawn = "by_shape"
    """See `Weight`."""
    expert: int | None = None
    """Global number of the expert that the parameter belongs to; None: every token passes it. An expert is whole on the
    ranks that hold it: they divide experts among them, not their matrices."""

    @property
    def axis(self) -> int | None:
        """Axis along which tensor parallel ranks divide the parameter; None: every rank that has it has all of it."""
        return _AXES.get(self.kind) if self.expert is None else None

    @property
    def is_of_attention(self) -> bool:
        """Whether data parallel attention divides the parameter within each group of an engine's ranks: heads, and the
        embedding."""
        return ".self_attention." in self.megatron or self.megatron == EMBEDDING

    @property
    def engine_name(self) -> str:
        """Name of the served model's parameter that holds the tensors."""
        return self.fused or self.hf[0]

    @property
    def stored(self) -> dict[str, tuple[str, ...]]:
        """Whole tensors that checkpoints store, each with the Hugging Face tensors in it. Shards of tensor ranks follow
        each other in query, key and value in Megatron's order, and likewise in linear attention's key heads; of a gated
        layer each rank has a part of both halves, which are stored separately."""
        return {self.engine_name: self.hf} if self.kind in ("qkv", "grouped") else {name: (name,) for name in self.hf}

    @property
    def tensors(self) -> dict[str, Shape]:
        """Shapes of its Hugging Face tensors by their names."""
        return dict(zip(self.hf, self.shapes, strict=True))

    def element_bytes(self, of_model: int) -> int:
        """Bytes of an element where it is stored or sent, in a model whose type has `of_model` bytes."""
        return 4 if self.wide else of_model

    @property
    def elements(self) -> int:
        """Elements of all its Hugging Face tensors together."""
        return sum(math.prod(shape) for shape in self.shapes)


def layer_weights(arch: ArchitectureConfig) -> Iterator[tuple[Weight, ...]]:
    """The weights that each layer consists of."""
    blocks = [(block.layers(arch), block.weights(arch)) for block in arch.declaration.blocks]
    for layer in range(arch.layers):
        yield tuple(weight for layers, weights in blocks if layer in layers for weight in weights)


def canonical_names(arch: ArchitectureConfig) -> dict[str, str]:
    """Canonical names, within a layer, of the parameters that Transformer Engine's layers name differently."""
    return {weight.alias: weight.megatron for weights in layer_weights(arch) for weight in weights if weight.alias}


def embedding(arch: ArchitectureConfig) -> Parameter:
    """The embedding, the first parameter of every model."""
    return Parameter(EMBEDDING, (HF_EMBEDDING,), ((arch.vocab_size, arch.hidden_size),), "vocab")


def model_parameters(arch: ArchitectureConfig, *, experts: Iterable[int] | None = None) -> Iterator[Parameter]:
    """Every parameter of a causal language model of this architecture, in the order of its family's blocks.

    With tied embeddings the output layer is not listed: it is the embedding. `experts`: only these of each layer.
    """
    chosen = tuple(experts) if experts is not None else range(arch.experts)
    yield embedding(arch)
    for layer, weights in enumerate(layer_weights(arch)):
        yield from (_in_layer(weight, layer) for weight in weights if not weight.is_of_experts)
        for expert in chosen:
            yield from (_in_layer(weight, layer, expert) for weight in weights if weight.is_of_experts)
    yield Parameter("decoder.final_layernorm.weight", ("model.norm.weight",), ((arch.hidden_size,),), "replicated")
    if not arch.tied_embeddings:
        yield replace(embedding(arch), megatron=OUTPUT_LAYER, hf=(HF_OUTPUT_LAYER,))


def _in_layer(weight: Weight, layer: int, expert: int | None = None) -> Parameter:
    prefix = f"model.layers.{layer}."
    return Parameter(
        f"decoder.layers.{layer}.{weight.megatron.format(expert=expert)}",
        tuple(prefix + name.format(expert=expert) for name in weight.tensors),
        tuple(weight.tensors.values()),
        weight.kind,
        fused=weight.fused and prefix + weight.fused,
        packed=weight.packed and prefix + weight.packed,
        interleaved=weight.interleaved,
        layer=layer,
        wide=weight.wide,
        sections=weight.sections,
        drawn=weight.drawn,
        expert=expert,
    )


def tensor_shapes(arch: ArchitectureConfig, *, output_layer: bool = True) -> dict[str, Shape]:
    """Shapes of all Hugging Face tensors of this architecture by their names."""
    parameters = (p for p in model_parameters(arch) if output_layer or p.megatron != OUTPUT_LAYER)
    return {name: shape for p in parameters for name, shape in p.tensors.items()}


@lru_cache(maxsize=64)
def wide_tensors(arch: ArchitectureConfig) -> frozenset[str]:
    """Names of the Hugging Face tensors that are in float32 whatever the model's type."""
    return frozenset(name for p in model_parameters(arch, experts=()) if p.wide for name in p.hf)


@lru_cache(maxsize=64)
def expert_parameters(arch: ArchitectureConfig) -> int:
    """Weights of one expert in one layer; 0 for a dense model."""
    *_, last = layer_weights(arch)
    of_experts = (weight for weight in last if weight.is_of_experts)
    return sum(math.prod(shape) for weight in of_experts for shape in weight.tensors.values())


@lru_cache(maxsize=64)
def multiplied_parameters(arch: ArchitectureConfig) -> int:
    """Number of weights that a token is multiplied with: all except an untied input embedding and the experts that it
    is not sent to."""
    active = model_parameters(arch, experts=range(arch.experts_per_token))
    return sum(p.elements for p in active if arch.tied_embeddings or p.megatron != EMBEDDING)


def pieces(arch: ArchitectureConfig, parameter: Parameter, tensor_rank: int, tp: int, padded_vocab: int) -> list[Piece]:
    """The slices whose concatenation is the shard of `tensor_rank` out of `tp`.

    A `vocab` shard ends with rows of padding where its pieces hold fewer rows than padded_vocab / tp.
    """
    named, dim = parameter.tensors.items(), parameter.axis
    if dim is None:
        return [Piece(name, 0, 0, shape[0]) for name, shape in named]
    if parameter.kind == "qkv":
        return _grouped_pieces(parameter, arch.kv_heads_of(parameter.layer), tensor_rank, tp)
    if parameter.kind == "grouped":
        assert arch.delta_net is not None
        return _grouped_pieces(parameter, arch.delta_net.key_heads, tensor_rank, tp)
    found = []
    for name, shape in named:
        part = (padded_vocab if parameter.kind == "vocab" else shape[dim]) // tp
        start, stop = (min(n * part, shape[dim]) for n in (tensor_rank, tensor_rank + 1))
        found.append(Piece(name, dim, start, stop))
    return found


def _grouped_pieces(parameter: Parameter, groups: int, tensor_rank: int, tp: int) -> list[Piece]:
    """Slices by group, each group with its rows of every part of every tensor, as Megatron interleaves queries, keys
    and values."""
    found = []
    sections = parameter.sections or tuple((shape[0],) for shape in parameter.shapes)
    for group in range(tensor_rank * groups // tp, (tensor_rank + 1) * groups // tp):
        for name, of_tensor in zip(parameter.hf, sections, strict=True):
            start = 0
            for size in of_tensor:
                rows = size // groups
                found.append(Piece(name, 0, start + group * rows, start + (group + 1) * rows))
                start += size
    return found


def shard_shape(arch: ArchitectureConfig, parameter: Parameter, tp: int, padded_vocab: int) -> Shape:
    """Shape of the parameter on one tensor parallel rank."""
    first = parameter.shapes[0]
    if parameter.kind == "vocab":
        return (padded_vocab // tp, *first[1:])
    slices = pieces(arch, parameter, 0, tp, padded_vocab)
    dim = slices[0].dim
    return (*first[:dim], sum(p.size for p in slices), *first[dim + 1 :])


def expert_share(arch: ArchitectureConfig, parameter: Parameter, ep: int) -> int | None:
    """Number of the expert parallel share, out of `ep`, that a parameter is in; None for what every token passes."""
    return None if parameter.expert is None else parameter.expert * ep // arch.experts
