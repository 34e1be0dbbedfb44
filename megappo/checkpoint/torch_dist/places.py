"""Places of a model's parameters in a checkpoint of Megatron-Core: tensor names, and the axes before each matrix.

Megatron-Core names tensors in three ways, of which a checkpoint has one. By default all layers are in one tensor, which
has an axis for them, and then one for the experts. With `non_homogeneous_layers`, which mixed layers need, there is a
tensor for each layer. With `singleton_local_shards` there is also one for each expert and each half of a gated matrix.
Norms before a linear layer have the names of Transformer Engine's fused layers, also where they were not fused; a norm
before experts has either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from megappo.families.architecture import ArchitectureConfig
from megappo.families.declaration import Shape
from megappo.families.parameters import EMBEDDING, OUTPUT_LAYER, Parameter, canonical_names

OUTPUT_BIAS = "output_layer.bias"
_LAYERS = "decoder.layers."
_OF_EXPERTS = {"weight1": "linear_fc1.weight", "weight2": "linear_fc2.weight"}
_HALVES = ("_w", "_v")


@dataclass(frozen=True)
class StoredPlace:
    """Place of a matrix or vector in a stored tensor: the whole tensor, or an index along its first axes."""

    key: str
    shape: Shape
    index: tuple[int, ...] = ()
    """Index along the first axes: of the layer, the expert, both or neither."""
    counts: tuple[int, ...] = ()
    """Sizes of the axes that `index` is along."""

    @property
    def size(self) -> Shape:
        """Shape of the whole stored tensor."""
        return (*self.counts, *self.shape)


def places(arch: ArchitectureConfig, parameter: Parameter) -> Iterator[tuple[StoredPlace, ...]]:
    """Every way in which a parameter may be stored, the usual one first: as a whole, or in two halves."""
    if parameter.layer is None:
        yield (StoredPlace(parameter.megatron, _stored_shape(parameter)),)
        return
    experts: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    if parameter.expert is not None:
        experts = (parameter.expert,), (arch.experts,)
    shape, layer = _stored_shape(parameter), parameter.layer
    for name in stored_names(arch, parameter):
        yield (StoredPlace(_LAYERS + name, shape, (layer, *experts[0]), (arch.layers, *experts[1])),)
        yield (StoredPlace(f"{_LAYERS}{layer}.{name}", shape, *experts),)
    yield from _singletons(parameter, layer)


def _singletons(parameter: Parameter, layer: int) -> Iterator[tuple[StoredPlace, ...]]:
    """The way with a tensor for each expert, and for each half of a gated matrix."""
    if parameter.expert is None and len(parameter.hf) != len(_HALVES):
        return  # named as in the way with a tensor for each layer
    name = _in_layer(parameter)
    if parameter.expert is not None:
        experts = "mlp.experts.experts."
        name = name.replace(experts, f"{experts}{parameter.expert}.", 1)
    key = f"{_LAYERS}{layer}.{name}"
    if len(parameter.hf) == 1:
        yield (StoredPlace(key, _stored_shape(parameter)),)
    else:
        yield tuple(StoredPlace(key + half, shape) for half, shape in zip(_HALVES, parameter.shapes, strict=True))


def stored_names(arch: ArchitectureConfig, parameter: Parameter) -> tuple[str, ...]:
    """Names that a parameter may have within its layer, fused ones first."""
    name = _in_layer(parameter)
    if parameter.expert is not None:
        return (name,)
    fused = {canonical: alias for alias, canonical in canonical_names(arch).items()}
    return (fused[name], name) if name in fused else (name,)


def written_places(arch: ArchitectureConfig, parameter: Parameter) -> list[StoredPlace]:
    """Places that a parameter is written to, so that models of either kind of layers find it: all layers in one
    tensor."""
    usual = next(places(arch, parameter))[0]
    if parameter.layer is None:
        return [usual]
    fused, *plain = stored_names(arch, parameter)
    # Before experts, Megatron-Core's own layers look for the fused name and Transformer Engine's for the plain one.
    names = [fused, *plain] if arch.experts and fused.startswith("mlp.linear_fc1.") else [fused]
    return [replace(usual, key=_LAYERS + name) for name in names]


def _in_layer(parameter: Parameter) -> str:
    name = parameter.megatron.removeprefix(f"{_LAYERS}{parameter.layer}.")
    if parameter.expert is None:
        return name
    return f"mlp.experts.experts.{_OF_EXPERTS[name.rpartition('.')[2]]}"


def _stored_shape(parameter: Parameter) -> Shape:
    """Shape of the parameter without tensor parallelism and padding."""
    rows = sum(shape[0] for shape in parameter.shapes)
    return (rows, *parameter.shapes[0][1:])


@dataclass(frozen=True)
class StoredRows:
    """Rows of a Hugging Face tensor within a stored one: `run` rows at a time, `stride` rows from run to run."""

    place: StoredPlace
    first: int
    run: int
    stride: int

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Rows `start:stop` of the Hugging Face tensor as ranges of stored rows, in their order."""
        while start < stop:
            number, within = divmod(start, self.run)
            length = min(self.run - within, stop - start)
            stored = self.first + number * self.stride + within
            yield stored, stored + length
            start += length


def rows_of(arch: ArchitectureConfig, parameter: Parameter, stored: tuple[StoredPlace, ...]) -> dict[str, StoredRows]:
    """The stored rows of each of a parameter's Hugging Face tensors."""
    if len(stored) > 1:
        named = zip(parameter.tensors.items(), stored, strict=True)
        return {name: StoredRows(place, 0, shape[0], 0) for (name, shape), place in named}
    # Query, key and value of a group of heads follow each other.
    groups = arch.kv_heads_of(parameter.layer) if parameter.kind == "qkv" else 1
    stride = sum(shape[0] for shape in parameter.shapes) // groups
    found, first = {}, 0
    for name, shape in parameter.tensors.items():
        run = shape[0] // groups
        found[name] = StoredRows(stored[0], first, run, stride)
        first += run
    return found


def chosen_places(arch: ArchitectureConfig, parameter: Parameter, keys: Collection[str]) -> tuple[StoredPlace, ...]:
    """The way in which a checkpoint with these tensors stores a parameter. Raises ValueError where it does not."""
    ways = list(places(arch, parameter))
    for way in ways:
        if all(place.key in keys for place in way):
            return way
    raise ValueError(f"holds no tensor '{ways[0][0].key}'")


def is_padded(parameter: Parameter) -> bool:
    """Whether a parameter may have more stored rows than the model: those of a vocabulary may be padded."""
    return parameter.megatron in (EMBEDDING, OUTPUT_LAYER)
