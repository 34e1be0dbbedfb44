"""Compute the sender and the receivers of each slice of the weights of a role. All functions are pure functions of
grids and parameters.

A receiver is a rank and a part of every parameter: the whole parameter, or the shard of one rank of an engine. The
receiver gets missing slices from its own replica and context rank, and from its own copy of the experts. The traffic
of the ranks of one model copy therefore does not grow with the number of copies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from megappo.config.grid import Grid
from megappo.families.architecture import padded_vocab_size
from megappo.families.declaration import ArchitectureConfig, Kind, Shape
from megappo.families.parameters import EMBEDDING, Parameter, Piece, expert_share, model_parameters, pieces

_VOCAB_MULTIPLE = 64  # DEFAULT_VOCAB_PADDING_SIZE of SGLang 0.5.23 (srt/layers/vocab_parallel_embedding.py:48)
Region = tuple[slice, ...]
"""Part of a tensor: a slice along each dimension."""


@dataclass(frozen=True)
class EngineShape:
    """Layout of a model in an engine."""

    arch: ArchitectureConfig
    tp: int
    ep: int = 1
    """Number of rank groups with whole experts. The first tp / ep ranks form the first group."""
    attention: int = 1
    """Number of rank groups with all attention heads. The first tp / attention ranks form the first group."""

    def of_experts(self, rank: int) -> tuple[range, EngineShape, int]:
        """Return the experts of a rank, the layout of an expert within its rank group, and the place of the rank in
        the group."""
        count, ranks = self.arch.experts // self.ep, self.tp // self.ep
        group, place = divmod(rank, ranks)
        return range(group * count, (group + 1) * count), EngineShape(self.arch, ranks), place

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding of the engine over all ranks."""
        rows = padded_vocab_size(self.arch.vocab_size, self.tp, _VOCAB_MULTIPLE)
        return padded_vocab_size(rows, self.tp, _VOCAB_MULTIPLE * self.tp) if rows % self.tp else rows

    def pieces(self, parameter: Parameter, rank: int) -> list[Piece]:
        """Return the slices whose concatenation is the parameter of the engine on one of the tensor-parallel ranks.
        For an expert, the ranks are those of its group."""
        shape, place = self._sharing(parameter, rank)
        cuts = _engine_cuts(shape, parameter.kind, parameter.shapes, place, self.arch.kv_heads_of(parameter.layer))
        return [Piece(name, *cut) for name, cut in zip(parameter.hf, cuts, strict=True)]

    def _sharing(self, parameter: Parameter, rank: int) -> tuple[EngineShape, int]:
        """Return the layout of the ranks that divide a parameter, and the place of a rank in this layout."""
        if self.attention == 1 or not parameter.is_of_attention:
            return self, rank
        ranks = self.tp // self.attention
        return EngineShape(self.arch, ranks), rank % ranks

    def padding(self, parameter: Parameter, rank: int) -> int:
        """Return the number of zero rows after the slices of `pieces`."""
        if parameter.kind != "vocab":
            return 0
        shape, _ = self._sharing(parameter, rank)
        return shape.padded_vocab // shape.tp - self.pieces(parameter, rank)[0].size


@lru_cache(maxsize=4096)
def _engine_cuts(
    shape: EngineShape, kind: Kind, shapes: tuple[Shape, ...], rank: int, kv_heads: int
) -> tuple[tuple[int, int, int], ...]:
    """Return dimension, start and stop for each tensor of a parameter. `kv_heads` is the number of its layer."""
    tp, rows = shape.tp, shapes[0][0]
    if kind == "row":
        width = shapes[0][1] // tp
        return ((1, rank * width, (rank + 1) * width),)
    if kind == "vocab":
        part = shape.padded_vocab // tp
        return ((0, min(rank * part, rows), min((rank + 1) * part, rows)),)
    if kind == "column":
        return tuple((0, rank * s[0] // tp, (rank + 1) * s[0] // tp) for s in shapes)
    if kind == "qkv":
        # Queries are divided among ranks. Keys and values are divided too, or repeated if there are fewer heads than
        # ranks.
        heads, first = max(1, kv_heads // tp), rank * kv_heads // tp
        of_head = shapes[1][0] // kv_heads
        of_keys = (0, first * of_head, (first + heads) * of_head)
        return ((0, rank * rows // tp, (rank + 1) * rows // tp), *(of_keys for _ in shapes[1:]))
    return tuple((0, 0, s[0]) for s in shapes)


@lru_cache(maxsize=4096)
def _cut_elements(shape: EngineShape, kind: Kind, shapes: tuple[Shape, ...], rank: int, kv_heads: int) -> int:
    cuts = _engine_cuts(shape, kind, shapes, rank, kv_heads)
    return sum((stop - start) * math.prod(s) // s[dim] for (dim, start, stop), s in zip(cuts, shapes, strict=True))


class Receiver(NamedTuple):
    """A rank that receives weights, and the part that the rank needs."""

    rank: int
    tp: int = 1
    """Number of ranks of the engine, if the receiver feeds one of these ranks. 1 selects whole tensors."""
    tensor_rank: int = 0
    """Number of the engine rank that the receiver feeds."""
    stage: int | None = None
    """Pipeline stage of the received parameters. None selects all stages."""
    share: tuple[int, int] = (0, 1)
    """(k, n): every n-th parameter is received, starting with the k-th."""

    @property
    def part(self) -> tuple[int, int]:
        """The received part of a parameter. Receivers with the same part get the same bytes."""
        return self.tp, self.tensor_rank


class SlicedCopy(NamedTuple):
    """A slice of the shard of one rank, and its place in the tensor of a receiver."""

    parameter: Parameter
    name: str
    """Name of the Hugging Face tensor."""
    source: Region
    """Region within the shard."""
    target: Region
    """Region within the tensor of the receiver."""

    @property
    def shape(self) -> Shape:
        """Shape of the slice."""
        return tuple(part.stop - part.start for part in self.target)

    @property
    def elements(self) -> int:
        """Number of elements of the slice."""
        return math.prod(self.shape)


class Home(NamedTuple):
    """Coordinates of the copy of the weights that a rank receives from. For ranks of the role these are its own
    coordinates. Other ranks get coordinates in the role."""

    replica: int
    context_rank: int
    tensor_rank: int


@dataclass(frozen=True, eq=False)
class Holdings:
    """The weights of a role on each rank."""

    arch: ArchitectureConfig
    grid: Grid
    padded_vocab: int
    stage_of: Mapping[str, int]
    """Pipeline stage of each existing parameter, by canonical name."""
    stands_for: Sequence[int] | None = None
    """Number of layers that the only layer of each stage represents, in a plan. None if all layers exist."""
    parameters: Sequence[Parameter] = field(init=False)
    """Existing parameters, in the order of the model."""

    def __post_init__(self) -> None:
        existing = tuple(p for p in model_parameters(self.arch) if p.megatron in self.stage_of)
        object.__setattr__(self, "parameters", existing)

    @classmethod
    def planned(cls, arch: ArchitectureConfig, grid: Grid, padded_vocab: int, stage_layers: Sequence[int]) -> Holdings:
        """Return the holdings of a planned role with `stage_layers` layers in each pipeline stage. One layer of each
        stage represents all layers of the stage."""
        some = None if arch.delta_net is None else replace(arch.delta_net, layers=tuple(range(grid.pp)))
        # A layer with experts also represents layers without experts. A layer with linear attention, the most
        # frequent kind, represents all layers.
        small = replace(arch, layers=grid.pp, dense_layers=0, delta_net=some)
        stage_of = {p.megatron: grid.pp - 1 if p.layer is None else p.layer for p in model_parameters(small)}
        return cls(small, grid, padded_vocab, {**stage_of, EMBEDDING: 0}, tuple(stage_layers))

    def home(self, rank: int) -> Home:
        """Return the home of a rank. Ranks outside of the role are distributed over the ranks of the role."""
        place = self.grid.place(rank) or self.grid.place(self.grid.ranks[rank % len(self.grid.ranks)])
        assert place is not None
        return Home(place[0], *place[2:])

    def holders(self, parameter: Parameter, home: Home) -> Iterator[tuple[int, list[Piece]]]:
        """Yield the ranks from which a receiver of this home gets a parameter, and the slices on each rank."""
        grid, stage = self.grid, self.stage_of[parameter.megatron]
        share = expert_share(self.arch, parameter, grid.ep)
        if share is not None:
            replica, _ = grid.expert_place(*home)
            yield grid.expert_owner(stage, share, replica), self._pieces(parameter, 0)
        elif parameter.axis is None:
            yield grid.rank(home.replica, stage, home.tensor_rank, home.context_rank), self._pieces(parameter, 0)
        else:
            for tensor_rank in range(grid.tp):
                rank = grid.rank(home.replica, stage, tensor_rank, home.context_rank)
                yield rank, self._pieces(parameter, tensor_rank)

    def is_sender(self, rank: int, home: Home) -> bool:
        """Return whether receivers of this home get any data from a rank."""
        place, grid = self.grid.place(rank), self.grid
        if place is None:
            return False
        replica, _, context_rank, tensor_rank = place
        same_experts = grid.expert_place(*home)[0] == grid.expert_place(replica, context_rank, tensor_rank)[0]
        return (replica, context_rank) == (home.replica, home.context_rank) or same_experts

    def has_shard(self, rank: int, parameter: Parameter) -> bool:
        """Return whether a rank has a shard of a parameter."""
        place, share = self.grid.place(rank), expert_share(self.arch, parameter, self.grid.ep)
        if place is None or place[1] != self.stage_of[parameter.megatron]:
            return False
        return share is None or share == self.grid.expert_place(place[0], *place[2:])[1]

    def _pieces(self, parameter: Parameter, tensor_rank: int) -> list[Piece]:
        return pieces(self.arch, parameter, tensor_rank, self.grid.tp, self.padded_vocab)

    def needs(self, receiver: Receiver, number: int, parameter: Parameter) -> bool:
        """Return whether a receiver needs the parameter with this number."""
        k, n = receiver.share
        return number % n == k and receiver.stage in (None, self.stage_of[parameter.megatron])

    def engine_pieces(self, part: tuple[int, int], parameter: Parameter) -> list[Piece]:
        """Return the slices of the tensors of a parameter on an engine rank, in order."""
        return EngineShape(self.arch, part[0]).pieces(parameter, part[1])

    def engine_elements(self, part: tuple[int, int], parameter: Parameter) -> int:
        """Return the number of elements of `engine_pieces`."""
        kv_heads = self.arch.kv_heads_of(parameter.layer)
        return _cut_elements(EngineShape(self.arch, part[0]), parameter.kind, parameter.shapes, part[1], kv_heads)

    def copies(
        self, part: tuple[int, int], parameter: Parameter, shard_pieces: Sequence[Piece]
    ) -> Iterator[SlicedCopy]:
        """Yield the parts of a shard that an engine rank needs. The shard consists of `shard_pieces`."""
        targets = {piece.name: piece for piece in self.engine_pieces(part, parameter)}
        offset = 0
        for piece in shard_pieces:
            shape = parameter.tensors[piece.name]
            have, want = _box(piece, shape), _box(targets[piece.name], shape)
            both = [(max(h[0], w[0]), min(h[1], w[1])) for h, w in zip(have, want, strict=True)]
            if all(start < stop for start, stop in both):
                origin = [start - (offset if dim == piece.dim else 0) for dim, (start, _) in enumerate(have)]
                source = tuple(slice(a - o, b - o) for (a, b), o in zip(both, origin, strict=True))
                target = tuple(slice(a - w[0], b - w[0]) for (a, b), w in zip(both, want, strict=True))
                yield SlicedCopy(parameter, piece.name, source, target)
            offset += piece.size

    def spread(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """Sort the parameters so that all ranks of a copy can send at any time. Pipeline stages alternate, and the
        expert-parallel shares of a layer alternate too."""
        of_share = max(1, self.arch.experts // self.grid.ep)
        first_of_layer: dict[tuple[int, int | None], int] = {}
        keyed = []
        for number, parameter in enumerate(parameters):
            stage, expert = self.stage_of[parameter.megatron], parameter.expert
            first = first_of_layer.setdefault((stage, parameter.layer), number)
            turn = -1 if expert is None else expert % of_share
            keyed.append((stage, (first, turn, number), parameter))
        elements = Counter[int]()
        for stage, _, parameter in keyed:
            elements[stage] += parameter.elements
        before, ordered = Counter[int](), []
        for stage, key, parameter in sorted(keyed, key=lambda entry: entry[:2]):
            ordered.append((before[stage] / elements[stage], stage, key, parameter))
            before[stage] += parameter.elements
        return [parameter for *_, parameter in sorted(ordered, key=lambda entry: entry[:3])]

    def buckets(self, receivers: Sequence[Receiver], most_elements: int) -> Iterator[tuple[Parameter, ...]]:
        """Yield groups of parameters for one transfer. No rank receives more than `most_elements` of one bucket,
        unless one parameter is larger. Parameters for receivers of one stage form separate buckets. Parameters in
        float32 form separate buckets too."""
        balanced = len({receiver.rank for receiver in receivers}) > 1
        for stage in dict.fromkeys(receiver.stage for receiver in receivers):
            of_ranks: dict[int, set[tuple[int, int]]] = {}
            for receiver in receivers:
                if receiver.stage == stage:
                    of_ranks.setdefault(receiver.rank, set()).add(receiver.part)
            parts = {frozenset(of_rank) for of_rank in of_ranks.values()}
            chosen = [p for p in self.parameters if stage in (None, self.stage_of[p.megatron])]
            for wide in (False, True):
                alike = [p for p in chosen if p.wide == wide]
                yield from self._cut(self.spread(alike) if balanced else alike, parts, most_elements)

    def _cut(
        self, parameters: Sequence[Parameter], parts: set[frozenset[tuple[int, int]]], most_elements: int
    ) -> Iterator[tuple[Parameter, ...]]:
        current: list[Parameter] = []
        size = 0
        for parameter in parameters:
            elements = max(sum(self.engine_elements(part, parameter) for part in of_rank) for of_rank in parts)
            if current and size + elements > most_elements:
                yield tuple(current)
                current, size = [], 0
            current.append(parameter)
            size += elements
        if current:
            yield tuple(current)

    def stage_bytes(self, stage: int, element_bytes: int) -> int:
        """Return the bytes of all parameters of a pipeline stage. A model element has `element_bytes` bytes."""
        own = (p for p in self.parameters if self.stage_of[p.megatron] == stage)
        return sum(p.elements * p.element_bytes(element_bytes) * self._times(p) for p in own)

    def _times(self, parameter: Parameter) -> int:
        """Return the number of model parameters that this parameter represents."""
        if parameter.layer is None or self.stands_for is None:
            return 1
        return self.stands_for[self.stage_of[parameter.megatron]]

    def sources(self, receiver: Receiver, element_bytes: int) -> Counter[int]:
        """Return the bytes that a receiver gets from each other rank, over the whole model. A model element has
        `element_bytes` bytes."""
        home, received = self.home(receiver.rank), Counter[int]()
        alike: dict[tuple[int, Kind, tuple[Shape, ...], int | None], dict[int, int]] = {}
        for number, parameter in enumerate(self.parameters):
            if not self.needs(receiver, number, parameter):
                continue
            share = expert_share(self.arch, parameter, self.grid.ep)
            key = (self.stage_of[parameter.megatron], parameter.kind, parameter.shapes, share)
            if key not in alike:
                alike[key] = {
                    rank: sum(copy.elements for copy in self.copies(receiver.part, parameter, shard))
                    for rank, shard in self.holders(parameter, home)
                    if rank != receiver.rank
                }
            each = parameter.element_bytes(element_bytes) * self._times(parameter)
            received.update({rank: elements * each for rank, elements in alike[key].items()})
        return received


def copy_ranks(grid: Grid) -> int:
    """Return the number of consecutive ranks that together have whole copies of the model, including experts, and
    need no other ranks."""
    return grid.pp * math.lcm(grid.tp * grid.cp, grid.ep)


def _box(piece: Piece, shape: Shape) -> list[tuple[int, int]]:
    """Return start and stop of a piece along each dimension of its tensor."""
    return [(piece.start, piece.stop) if dim == piece.dim else (0, size) for dim, size in enumerate(shape)]
