"""Computes who needs which slices of a role's weights and who gives them: pure functions of grids and parameters.

A receiver is a rank and what it wants of every parameter: all of it, or what one rank of an engine holds. It takes what
it lacks from its own replica and context rank, and its own copy of the experts. So the traffic of the ranks of one copy
of the model does not grow with the number of copies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from megappo.config.grid import Grid
from megappo.families.architecture import ArchitectureConfig, padded_vocab_size
from megappo.families.declaration import Kind, Shape
from megappo.families.parameters import EMBEDDING, Parameter, Piece, expert_share, model_parameters, pieces

_VOCAB_MULTIPLE = 64  # DEFAULT_VOCAB_PADDING_SIZE of SGLang 0.5.23 (srt/layers/vocab_parallel_embedding.py:48)
Region = tuple[slice, ...]
"""Part of a tensor: a slice along each of its dimensions."""


@dataclass(frozen=True)
class EngineShape:
    """Layout of a model in an engine."""

    arch: ArchitectureConfig
    tp: int
    ep: int = 1
    """Number of groups of ranks that hold whole experts; the first tp / ep ranks are the first group."""
    attention: int = 1
    """Number of groups of ranks that hold all heads; the first tp / attention ranks are the first group."""

    def of_experts(self, rank: int) -> tuple[range, EngineShape, int]:
        """The experts on a rank, the layout of an expert within its group of ranks, and the rank's place in the
        group."""
        held, ranks = self.arch.experts // self.ep, self.tp // self.ep
        group, place = divmod(rank, ranks)
        return range(group * held, (group + 1) * held), EngineShape(self.arch, ranks), place

    @property
    def padded_vocab(self) -> int:
        """Rows of the engine's embedding over all ranks."""
        rows = padded_vocab_size(self.arch.vocab_size, self.tp, _VOCAB_MULTIPLE)
        return padded_vocab_size(rows, self.tp, _VOCAB_MULTIPLE * self.tp) if rows % self.tp else rows

    def pieces(self, parameter: Parameter, rank: int) -> list[Piece]:
        """The slices whose concatenation is the engine's parameter on one of the tensor parallel ranks that divide it;
        of an expert, these are the ranks of its group."""
        shape, place = self._sharing(parameter, rank)
        cuts = _engine_cuts(shape, parameter.kind, parameter.shapes, place, self.arch.kv_heads_of(parameter.layer))
        return [Piece(name, *cut) for name, cut in zip(parameter.hf, cuts, strict=True)]

    def _sharing(self, parameter: Parameter, rank: int) -> tuple[EngineShape, int]:
        """The ranks that divide a parameter, and the place of a rank among them."""
        if self.attention == 1 or not parameter.is_of_attention:
            return self, rank
        ranks = self.tp // self.attention
        return EngineShape(self.arch, ranks), rank % ranks

    def padding(self, parameter: Parameter, rank: int) -> int:
        """Number of zero rows behind the slices of `pieces`."""
        if parameter.kind != "vocab":
            return 0
        shape, _ = self._sharing(parameter, rank)
        return shape.padded_vocab // shape.tp - self.pieces(parameter, rank)[0].size


@lru_cache(maxsize=4096)
def _engine_cuts(
    shape: EngineShape, kind: Kind, shapes: tuple[Shape, ...], rank: int, kv_heads: int
) -> tuple[tuple[int, int, int], ...]:
    """Dimension, start and stop for each of a parameter's tensors; `kv_heads`: of its layer."""
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
        # Queries are shared out; keys and values too, or repeated where there are fewer heads than ranks.
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
    """A rank that receives weights, and the part that it wants."""

    rank: int
    tp: int = 1
    """Ranks of the engine of which it feeds one; 1: whole tensors."""
    tensor_rank: int = 0
    """Number of the engine's rank that it feeds."""
    stage: int | None = None
    """Pipeline stage whose parameters are wanted; None: those of all stages."""
    share: tuple[int, int] = (0, 1)
    """(k, n): every n-th parameter is wanted, from the k-th on."""

    @property
    def part(self) -> tuple[int, int]:
        """The part of a parameter that is wanted; it is equal for receivers that get the same bytes."""
        return self.tp, self.tensor_rank


class SlicedCopy(NamedTuple):
    """A slice of one rank's shard, and its place in what a receiver wants of a tensor."""

    parameter: Parameter
    name: str
    """Name of the Hugging Face tensor."""
    source: Region
    """Region within the shard."""
    target: Region
    """Region within the receiver's tensor."""

    @property
    def shape(self) -> Shape:
        """Shape of the slice."""
        return tuple(part.stop - part.start for part in self.target)

    @property
    def elements(self) -> int:
        """Number of elements of the slice."""
        return math.prod(self.shape)


class Home(NamedTuple):
    """Coordinates of the copy of the weights that a rank draws on: its own place, or for ranks outside of the role a
    place in it."""

    replica: int
    context_rank: int
    tensor_rank: int


@dataclass(frozen=True, eq=False)
class Holdings:
    """What each rank holds of a role's weights."""

    arch: ArchitectureConfig
    grid: Grid
    padded_vocab: int
    stage_of: Mapping[str, int]
    """Pipeline stage of each existing parameter, by canonical names."""
    stands_for: Sequence[int] | None = None
    """Number of layers that each stage's only layer stands for, in a plan; None: all layers exist."""
    parameters: Sequence[Parameter] = field(init=False)
    """Existing parameters, in the model's order."""

    def __post_init__(self) -> None:
        found = tuple(p for p in model_parameters(self.arch) if p.megatron in self.stage_of)
        object.__setattr__(self, "parameters", found)

    @classmethod
    def planned(cls, arch: ArchitectureConfig, grid: Grid, padded_vocab: int, stage_layers: Sequence[int]) -> Holdings:
        """Holdings of a planned role with `stage_layers` layers in each pipeline stage: one layer of each stage stands
        for all."""
        some = None if arch.delta_net is None else replace(arch.delta_net, layers=tuple(range(grid.pp)))
        # A layer with experts stands also for those without, and one with linear attention, as most layers have, for
        # all.
        small = replace(arch, layers=grid.pp, dense_layers=0, delta_net=some)
        stage_of = {p.megatron: grid.pp - 1 if p.layer is None else p.layer for p in model_parameters(small)}
        return cls(small, grid, padded_vocab, {**stage_of, EMBEDDING: 0}, tuple(stage_layers))

    def home(self, rank: int) -> Home:
        """The place that a rank draws on; ranks outside of the role are spread over those in it."""
        place = self.grid.place(rank) or self.grid.place(self.grid.ranks[rank % len(self.grid.ranks)])
        assert place is not None
        return Home(place[0], *place[2:])

    def holders(self, parameter: Parameter, home: Home) -> Iterator[tuple[int, list[Piece]]]:
        """The ranks from which a receiver of this home gets a parameter, and the slices that each of them has."""
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

    def gives(self, rank: int, home: Home) -> bool:
        """Whether receivers of this home get anything from a rank."""
        place, grid = self.grid.place(rank), self.grid
        if place is None:
            return False
        replica, _, context_rank, tensor_rank = place
        same_experts = grid.expert_place(*home)[0] == grid.expert_place(replica, context_rank, tensor_rank)[0]
        return (replica, context_rank) == (home.replica, home.context_rank) or same_experts

    def holds(self, rank: int, parameter: Parameter) -> bool:
        """Whether a rank has a shard of a parameter."""
        place, share = self.grid.place(rank), expert_share(self.arch, parameter, self.grid.ep)
        if place is None or place[1] != self.stage_of[parameter.megatron]:
            return False
        return share is None or share == self.grid.expert_place(place[0], *place[2:])[1]

    def _pieces(self, parameter: Parameter, tensor_rank: int) -> list[Piece]:
        return pieces(self.arch, parameter, tensor_rank, self.grid.tp, self.padded_vocab)

    def wants(self, receiver: Receiver, number: int, parameter: Parameter) -> bool:
        """Whether a receiver wants anything of the parameter with this number."""
        k, n = receiver.share
        return number % n == k and receiver.stage in (None, self.stage_of[parameter.megatron])

    def wanted(self, part: tuple[int, int], parameter: Parameter) -> list[Piece]:
        """The slices of a parameter's tensors that an engine's rank holds, in their order."""
        return EngineShape(self.arch, part[0]).pieces(parameter, part[1])

    def wanted_elements(self, part: tuple[int, int], parameter: Parameter) -> int:
        """Number of elements of `wanted`."""
        kv_heads = self.arch.kv_heads_of(parameter.layer)
        return _cut_elements(EngineShape(self.arch, part[0]), parameter.kind, parameter.shapes, part[1], kv_heads)

    def copies(self, part: tuple[int, int], parameter: Parameter, held: Sequence[Piece]) -> Iterator[SlicedCopy]:
        """The parts of a shard, which consists of `held`, that an engine's rank wants."""
        wanted = {piece.name: piece for piece in self.wanted(part, parameter)}
        offset = 0
        for piece in held:
            shape = parameter.tensors[piece.name]
            have, want = _box(piece, shape), _box(wanted[piece.name], shape)
            both = [(max(h[0], w[0]), min(h[1], w[1])) for h, w in zip(have, want, strict=True)]
            if all(start < stop for start, stop in both):
                origin = [start - (offset if dim == piece.dim else 0) for dim, (start, _) in enumerate(have)]
                source = tuple(slice(a - o, b - o) for (a, b), o in zip(both, origin, strict=True))
                target = tuple(slice(a - w[0], b - w[0]) for (a, b), w in zip(both, want, strict=True))
                yield SlicedCopy(parameter, piece.name, source, target)
            offset += piece.size

    def spread(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """The parameters in an order in which all ranks of a copy have something to send at any time: pipeline stages
        alternate, and so do the expert parallel shares of a layer."""
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
        before, found = Counter[int](), []
        for stage, key, parameter in sorted(keyed, key=lambda entry: entry[:2]):
            found.append((before[stage] / elements[stage], stage, key, parameter))
            before[stage] += parameter.elements
        return [parameter for *_, parameter in sorted(found, key=lambda entry: entry[:3])]

    def buckets(self, receivers: Sequence[Receiver], most_elements: int) -> Iterator[tuple[Parameter, ...]]:
        """Groups of parameters that travel together. No rank receives more than `most_elements` of one bucket, unless
        one parameter is larger. Parameters for receivers of one stage travel separately, and so do those in float32."""
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
            elements = max(sum(self.wanted_elements(part, parameter) for part in of_rank) for of_rank in parts)
            if current and size + elements > most_elements:
                yield tuple(current)
                current, size = [], 0
            current.append(parameter)
            size += elements
        if current:
            yield tuple(current)

    def stage_bytes(self, stage: int, element_bytes: int) -> int:
        """Bytes of all parameters of a pipeline stage, in a model type of `element_bytes`."""
        here = (p for p in self.parameters if self.stage_of[p.megatron] == stage)
        return sum(p.elements * p.element_bytes(element_bytes) * self._times(p) for p in here)

    def _times(self, parameter: Parameter) -> int:
        """Number of the model's parameters that one of these stands for."""
        if parameter.layer is None or self.stands_for is None:
            return 1
        return self.stands_for[self.stage_of[parameter.megatron]]

    def sources(self, receiver: Receiver, element_bytes: int) -> Counter[int]:
        """Bytes that a receiver gets from each other rank, over the whole model in a type of `element_bytes`."""
        home, found = self.home(receiver.rank), Counter[int]()
        alike: dict[tuple[int, Kind, tuple[Shape, ...], int | None], dict[int, int]] = {}
        for number, parameter in enumerate(self.parameters):
            if not self.wants(receiver, number, parameter):
                continue
            share = expert_share(self.arch, parameter, self.grid.ep)
            key = (self.stage_of[parameter.megatron], parameter.kind, parameter.shapes, share)
            if key not in alike:
                alike[key] = {
                    rank: sum(copy.elements for copy in self.copies(receiver.part, parameter, held))
                    for rank, held in self.holders(parameter, home)
                    if rank != receiver.rank
                }
            each = parameter.element_bytes(element_bytes) * self._times(parameter)
            found.update({rank: elements * each for rank, elements in alike[key].items()})
        return found


def copy_ranks(grid: Grid) -> int:
    """Number of neighbouring ranks that together hold whole copies of the model, experts too, and need no other
    ranks."""
    return grid.pp * math.lcm(grid.tp * grid.cp, grid.ep)


def _box(piece: Piece, shape: Shape) -> list[tuple[int, int]]:
    """Start and stop of a piece along each dimension of its tensor."""
    return [(piece.start, piece.stop) if dim == piece.dim else (0, size) for dim, size in enumerate(shape)]
