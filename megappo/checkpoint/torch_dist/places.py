"""Places of a model's parameters in a checkpoint of Megatron-Core: tensor names, and leading axes.

Megatron-Core has three naming schemes, and a checkpoint uses one of them. By default, one tensor contains all layers,
with an axis for the layers, followed by an axis for the experts. With `non_homogeneous_layers`, which mixed layers
need, each layer has a tensor. With `singleton_local_shards`, each expert and each half of a gated matrix also have a
tensor. Norms before a linear layer have the names of Transformer Engine's fused layers, even if they are not fused. A
norm before experts may have either name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from megappo.families.declaration import ArchitectureConfig, Shape
from megappo.families.parameters import EMBEDDING, OUTPUT_LAYER, Parameter, canonical_names

OUTPUT_BIAS = "output_layer.bias"
_LAYERS = "decoder.layers."
_OF_EXPERTS = {"weight1": "linear_fc1.weight", "weight2": "linear_fc2.weight"}
_HALVES = ("_w", "_v")


@dataclass(frozen=True)
class StoredPlace:
    """Place of a matrix or vector in a stored tensor: the whole tensor, or an index along the first axes."""

    key: str
    shape: Shape
    index: tuple[int, ...] = ()
    """Index along the first axes: layer, expert, both or neither."""
    counts: tuple[int, ...] = ()
    """Sizes of the axes of `index`."""

    @property
    def size(self) -> Shape:
        """Shape of the whole stored tensor."""
        return (*self.counts, *self.shape)


def places(arch: ArchitectureConfig, parameter: Parameter) -> Iterator[tuple[StoredPlace, ...]]:
    """Yield the possible places of a parameter, the default first. A parameter is stored as a whole, or in two
    halves."""
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
    """Yield the places for one tensor per expert, and one tensor per half of a gated matrix."""
    if parameter.expert is None and len(parameter.hf) != len(_HALVES):
        return  # same name as with one tensor per layer
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
    """Return the possible names of a parameter within its layer, fused names first."""
    name = _in_layer(parameter)
    if parameter.expert is not None:
        return (name,)
    fused = {canonical: alias for alias, canonical in canonical_names(arch).items()}
    return (fused[name], name) if name in fused else (name,)


def written_places(arch: ArchitectureConfig, parameter: Parameter) -> list[StoredPlace]:
    """Return the places to write a parameter to, with all layers in one tensor. Both implementations of layers can load
    these places."""
    usual = next(places(arch, parameter))[0]
    if parameter.layer is None:
        return [usual]
    fused, *plain = stored_names(arch, parameter)
    # For norms before experts, Megatron-Core's layers use the fused name, Transformer Engine's layers the plain name.
    names = [fused, *plain] if arch.experts and fused.startswith("mlp.linear_fc1.") else [fused]
    return [replace(usual, key=_LAYERS + name) for name in names]


def _in_layer(parameter: Parameter) -> str:
    name = parameter.megatron.removeprefix(f"{_LAYERS}{parameter.layer}.")
    if parameter.expert is None:
        return name
    return f"mlp.experts.experts.{_OF_EXPERTS[name.rpartition('.')[2]]}"


def _stored_shape(parameter: Parameter) -> Shape:
    """Return the shape of the parameter without tensor parallelism and padding."""
    rows = sum(shape[0] for shape in parameter.shapes)
    return (rows, *parameter.shapes[0][1:])


@dataclass(frozen=True)
class StoredRows:
    """Rows of a Hugging Face tensor in a stored tensor: runs of `run` rows, with a distance of `stride` rows."""

    place: StoredPlace
    first: int
    run: int
    stride: int

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the stored ranges of the rows `start:stop` of the Hugging Face tensor, in order."""
        while start < stop:
            number, within = divmod(start, self.run)
            length = min(self.run - within, stop - start)
            stored = self.first + number * self.stride + within
            yield stored, stored + length
            start += length


def rows_of(arch: ArchitectureConfig, parameter: Parameter, stored: tuple[StoredPlace, ...]) -> dict[str, StoredRows]:
    """Return the stored rows of each Hugging Face tensor of a parameter."""
    if len(stored) > 1:
        named = zip(parameter.tensors.items(), stored, strict=True)
        return {name: StoredRows(place, 0, shape[0], 0) for (name, shape), place in named}
    # Query, key and value of a group of heads are contiguous.
    groups = arch.kv_heads_of(parameter.layer) if parameter.kind == "qkv" else 1
    stride = sum(shape[0] for shape in parameter.shapes) // groups
    rows, first = {}, 0
    for name, shape in parameter.tensors.items():
        run = shape[0] // groups
        rows[name] = StoredRows(stored[0], first, run, stride)
        first += run
    return rows


def chosen_places(arch: ArchitectureConfig, parameter: Parameter, keys: Collection[str]) -> tuple[StoredPlace, ...]:
    """Return the places of a parameter in a checkpoint with these tensors. Raises ValueError if the parameter is
    missing."""
    ways = list(places(arch, parameter))
    for way in ways:
        if all(place.key in keys for place in way):
            return way
    raise ValueError(f"contains no tensor '{ways[0][0].key}'")


def is_padded(parameter: Parameter) -> bool:
    """Return whether a parameter may have padding rows, as parameters of the vocabulary."""
    return parameter.megatron in (EMBEDDING, OUTPUT_LAYER)
