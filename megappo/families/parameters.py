"""Map between Hugging Face tensors and Megatron shards.

On every tensor parallel rank, a Megatron parameter is a concatenation of slices of Hugging Face tensors. `pieces`
returns these slices. Loading reads the slices. Weight streams and exports copy shards into whole tensors. All of
them use the declaration of the family, so they are always consistent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from megappo.families.declaration import ArchitectureConfig, Drawn, Kind, Shape, Weight

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
    """One Megatron parameter and its Hugging Face tensors; see `Weight`."""

    megatron: str
    """Name within the model. Numbers of layers and experts are global."""
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    """Shape of each Hugging Face tensor, in the order of `hf`."""
    kind: Kind
    fused: str = ""
    packed: str = ""
    interleaved: bool = False
    """See `Weight`."""
    layer: int | None = None
    """Global layer number. None for the embedding, the final norm and the output layer."""
    wide: bool = False
    """See `Weight`."""
    sections: tuple[tuple[int, ...], ...] = ()
    """See `Weight`."""
    drawn: Drawn = "by_shape"
    """See `Weight`."""
    expert: int | None = None
    """Global number of the parameter's expert. None: every token uses the parameter. Each expert is stored whole:
    expert parallel ranks divide the experts, and no rank divides their matrices."""

    @property
    def axis(self) -> int | None:
        """Axis along which tensor parallel ranks divide the parameter. None: the parameter is stored whole."""
        return _AXES.get(self.kind) if self.expert is None else None

    @property
    def is_of_attention(self) -> bool:
        """Whether data parallel attention divides the parameter within each group of an engine's ranks. This applies
        to attention heads and to the embedding."""
        return ".self_attention." in self.megatron or self.megatron == EMBEDDING

    @property
    def engine_name(self) -> str:
        """Name of the parameter in SGLang's model that contains the tensors."""
        return self.fused or self.hf[0]

    @property
    def stored(self) -> dict[str, tuple[str, ...]]:
        """Whole tensors that checkpoints store, each with its Hugging Face tensors.

        Checkpoints store query, key and value as one tensor in Megatron's order, and also the key heads of linear
        attention. The shards of tensor parallel ranks are contiguous in this order. A rank has a part of both halves
        of a gated layer, so checkpoints store the two halves separately.
        """
        return {self.engine_name: self.hf} if self.kind in ("qkv", "grouped") else {name: (name,) for name in self.hf}

    @property
    def tensors(self) -> dict[str, Shape]:
        """Shapes of the Hugging Face tensors by name."""
        return dict(zip(self.hf, self.shapes, strict=True))

    def element_bytes(self, of_model: int) -> int:
        """Return the bytes of a stored or sent element. `of_model`: bytes of an element of the model's dtype."""
        return 4 if self.wide else of_model

    @property
    def elements(self) -> int:
        """Number of elements of all Hugging Face tensors."""
        return sum(math.prod(shape) for shape in self.shapes)


def layer_weights(arch: ArchitectureConfig) -> Iterator[tuple[Weight, ...]]:
    """Yield the weights of each layer."""
    blocks = [(block.layers(arch), block.weights(arch)) for block in arch.declaration.blocks]
    for layer in range(arch.layers):
        yield tuple(weight for layers, weights in blocks if layer in layers for weight in weights)


def canonical_names(arch: ArchitectureConfig) -> dict[str, str]:
    """Return Megatron's names by Transformer Engine's names, within a layer, for parameters whose names differ."""
    return {weight.alias: weight.megatron for weights in layer_weights(arch) for weight in weights if weight.alias}


def embedding(arch: ArchitectureConfig) -> Parameter:
    """Return the embedding, which is the first parameter of every model."""
    return Parameter(EMBEDDING, (HF_EMBEDDING,), ((arch.vocab_size, arch.hidden_size),), "vocab")


def model_parameters(arch: ArchitectureConfig, *, experts: Iterable[int] | None = None) -> Iterator[Parameter]:
    """Yield every parameter of a causal language model of this architecture, in the order of its family's blocks.

    Models with tied embeddings have no separate output layer. `experts`: yield the parameters of these experts only.
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
    """Return the shapes of all Hugging Face tensors of this architecture by name."""
    parameters = (p for p in model_parameters(arch) if output_layer or p.megatron != OUTPUT_LAYER)
    return {name: shape for p in parameters for name, shape in p.tensors.items()}


@lru_cache(maxsize=64)
def wide_tensors(arch: ArchitectureConfig) -> frozenset[str]:
    """Return the names of the Hugging Face tensors that are float32 for every `model.dtype`."""
    return frozenset(name for p in model_parameters(arch, experts=()) if p.wide for name in p.hf)


@lru_cache(maxsize=64)
def expert_parameters(arch: ArchitectureConfig) -> int:
    """Return the number of weights of one expert in one layer. Returns 0 for a dense model."""
    *_, last = layer_weights(arch)
    of_experts = (weight for weight in last if weight.is_of_experts)
    return sum(math.prod(shape) for weight in of_experts for shape in weight.tensors.values())


@lru_cache(maxsize=64)
def multiplied_parameters(arch: ArchitectureConfig) -> int:
    """Return the number of weights that are multiplied with each token.

    The number excludes an untied input embedding and the experts that a token does not use.
    """
    active = model_parameters(arch, experts=range(arch.experts_per_token))
    return sum(p.elements for p in active if arch.tied_embeddings or p.megatron != EMBEDDING)


def pieces(arch: ArchitectureConfig, parameter: Parameter, tensor_rank: int, tp: int, padded_vocab: int) -> list[Piece]:
    """Return the slices whose concatenation is the shard of rank `tensor_rank` of `tp` ranks.

    A `vocab` shard is padded at its end if its slices have fewer than padded_vocab / tp rows.
    """
    named, dim = parameter.tensors.items(), parameter.axis
    if dim is None:
        return [Piece(name, 0, 0, shape[0]) for name, shape in named]
    if parameter.kind == "qkv":
        return _grouped_pieces(parameter, arch.kv_heads_of(parameter.layer), tensor_rank, tp)
    if parameter.kind == "grouped":
        assert arch.delta_net is not None
        return _grouped_pieces(parameter, arch.delta_net.key_heads, tensor_rank, tp)
    slices = []
    for name, shape in named:
        part = (padded_vocab if parameter.kind == "vocab" else shape[dim]) // tp
        start, stop = (min(n * part, shape[dim]) for n in (tensor_rank, tensor_rank + 1))
        slices.append(Piece(name, dim, start, stop))
    return slices


def _grouped_pieces(parameter: Parameter, groups: int, tensor_rank: int, tp: int) -> list[Piece]:
    """Return slices by group. Each group contains its rows of every section of every tensor.

    Megatron interleaves queries, keys and values in this way.
    """
    slices = []
    sections = parameter.sections or tuple((shape[0],) for shape in parameter.shapes)
    for group in range(tensor_rank * groups // tp, (tensor_rank + 1) * groups // tp):
        for name, of_tensor in zip(parameter.hf, sections, strict=True):
            start = 0
            for size in of_tensor:
                rows = size // groups
                slices.append(Piece(name, 0, start + group * rows, start + (group + 1) * rows))
                start += size
    return slices


def shard_shape(arch: ArchitectureConfig, parameter: Parameter, tp: int, padded_vocab: int) -> Shape:
    """Return the shape of the parameter on one tensor parallel rank."""
    first = parameter.shapes[0]
    if parameter.kind == "vocab":
        return (padded_vocab // tp, *first[1:])
    slices = pieces(arch, parameter, 0, tp, padded_vocab)
    dim = slices[0].dim
    return (*first[:dim], sum(p.size for p in slices), *first[dim + 1 :])


def expert_share(arch: ArchitectureConfig, parameter: Parameter, ep: int) -> int | None:
    """Return the expert parallel rank, out of `ep`, that stores the parameter. Returns None for parameters that
    every token uses."""
    return None if parameter.expert is None else parameter.expert * ep // arch.experts
