"""The weight stream: from the shards of a layout to Hugging Face tensors, or to what an engine's rank holds of them.

Weights travel in buckets, straight from the ranks that hold something to those that want it (`slices`); no other rank
takes part. A receiver gets one flat run of bytes of each bucket, in which its tensors follow each other. The bytes
arrive in messages; where all ranks are on one machine, each rank copies its own slices into memory that they share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.config.grid import Grid
from megappo.errors import RunError, first_of
from megappo.families.declaration import Shape
from megappo.families.parameters import OUTPUT_LAYER, Parameter, model_parameters
from megappo.observe.progress import PROGRESS, WEIGHTS
from megappo.reshard.slices import Holdings, Home, Receiver, SlicedCopy
from megappo.runtime.device import plain_segments
from megappo.runtime.objects import all_gather_objects

if TYPE_CHECKING:
    from megappo.megatron.roles import Role


class Slot(NamedTuple):
    """Place of a tensor in a payload."""

    name: str
    shape: Shape
    dtype: torch.dtype
    start: int
    """Offset of its first byte."""
    stop: int

    def view(self, flat_bytes: Tensor) -> Tensor:
        """The tensor inside a payload's bytes."""
        return flat_bytes[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class ReceiverPayload:
    """The part of a bucket that one receiver gets: its tensors in one flat run of bytes."""

    receiver: Receiver
    parameters: tuple[Parameter, ...]
    slots: tuple[Slot, ...]

    @property
    def n_bytes(self) -> int:
        """Size of the payload."""
        return self.slots[-1].stop

    def tensors(self, flat_bytes: Tensor) -> dict[str, Tensor]:
        """Views of the payload's tensors in its bytes, by their names."""
        return {slot.name: slot.view(flat_bytes) for slot in self.slots}


@dataclass(frozen=True)
class Message:
    """Slices that one rank gives to some receivers, in the order of the message."""

    rank: int
    """Rank that gives the slices."""
    receivers: tuple[int, ...]
    """Numbers of the receivers that get them."""
    copies: tuple[SlicedCopy, ...]

    @property
    def elements(self) -> int:
        """Number of elements of the message."""
        return sum(copy.elements for copy in self.copies)


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together, from one rank's point of view."""

    payloads: tuple[ReceiverPayload, ...]
    """Payloads of this rank's receivers."""
    dtype: torch.dtype
    """Type of all tensors of the bucket."""
    incoming: tuple[Message, ...]
    """Messages to receivers of this rank, each for one; the rank's own slices are among them."""
    outgoing: tuple[Message, ...]
    """Messages to receivers of other ranks."""

    @property
    def sends(self) -> list[tuple[int, Message]]:
        """Each outgoing message with the number of a receiver, sorted by it. Both ends thus order the messages between
        two ranks alike, and point-to-point messages are matched by their order."""
        found = [(number, message) for message in self.outgoing for number in message.receivers]
        return sorted(found, key=lambda entry: entry[0])


class Delivery:
    """Plan of how a role's weights get to some receivers: what this rank sends and gets, bucket by bucket. It is made
    once."""

    def __init__(
        self,
        holdings: Holdings,
        receivers: Sequence[Receiver],
        bucket_bytes: int,
        dtype: torch.dtype,
        rank: int,
        *,
        shared: bool = False,
    ) -> None:
        """`shared`: payloads lie in memory that all ranks see, and each rank writes what it holds."""
        self.receivers = tuple(receivers)
        self._holdings, self._dtype, self._rank, self._shared = holdings, dtype, rank, shared
        self._number = {p.megatron: number for number, p in enumerate(holdings.parameters)}
        self._homes = [holdings.home(receiver.rank) for receiver in receivers]
        self._mine = [n for n, receiver in enumerate(self.receivers) if shared or receiver.rank == rank]
        given = (n for n, home in enumerate(self._homes) if holdings.gives(rank, home))
        self._others = [n for n in given if n not in self._mine]
        cut = holdings.buckets(self.receivers, bucket_bytes // dtype.itemsize)
        made = (self._bucket(parameters) for parameters in cut)
        self.buckets = tuple(bucket for bucket in made if bucket.payloads or bucket.outgoing)
        """Buckets of which this rank gets or sends something."""

    def largest_bytes(self, part: tuple[int, int]) -> int:
        """Bytes that a buffer for this rank's receivers of a part must hold."""
        payloads = (payload for bucket in self.buckets for payload in bucket.payloads)
        return max(payload.n_bytes for payload in payloads if payload.receiver.part == part)

    def _bucket(self, parameters: tuple[Parameter, ...]) -> Bucket:
        dtype = torch.float32 if parameters[0].wide else self._dtype
        payloads, incoming, outgoing = list[ReceiverPayload](), list[Message](), list[Message]()
        for number in self._mine:
            if chosen := self._chosen(number, parameters):
                payloads.append(self._payload(self.receivers[number], chosen, dtype))
                incoming += self._incoming(number, chosen)
        held = [p for p in parameters if self._holdings.holds(self._rank, p)]
        alike: dict[tuple[tuple[int, int], tuple[Parameter, ...]], list[int]] = {}
        for number in self._others:
            if given := self._given(number, self._chosen(number, held)):
                alike.setdefault((self.receivers[number].part, given), []).append(number)
        for (part, given), numbers in alike.items():
            if copies := tuple(self._copies(part, given, self._homes[numbers[0]])):
                outgoing.append(Message(self._rank, tuple(numbers), copies))
        return Bucket(tuple(payloads), dtype, tuple(incoming), tuple(outgoing))

    def _chosen(self, number: int, parameters: Sequence[Parameter]) -> list[Parameter]:
        receiver = self.receivers[number]
        return [p for p in parameters if self._holdings.wants(receiver, self._number[p.megatron], p)]

    def _payload(self, receiver: Receiver, parameters: Sequence[Parameter], dtype: torch.dtype) -> ReceiverPayload:
        slots, start = [], 0
        for parameter in parameters:
            for piece in self._holdings.wanted(receiver.part, parameter):
                whole = parameter.tensors[piece.name]
                shape = (*whole[: piece.dim], piece.size, *whole[piece.dim + 1 :])
                stop = start + math.prod(shape) * dtype.itemsize
                slots.append(Slot(piece.name, shape, dtype, start, stop))
                start = stop
        return ReceiverPayload(receiver, tuple(parameters), tuple(slots))

    def _incoming(self, number: int, parameters: Sequence[Parameter]) -> Iterator[Message]:
        of_ranks: dict[int, list[SlicedCopy]] = {}
        for parameter in parameters:
            for rank, held in self._holdings.holders(parameter, self._homes[number]):
                if not self._shared or rank == self._rank:
                    copies = self._holdings.copies(self.receivers[number].part, parameter, held)
                    of_ranks.setdefault(rank, []).extend(copies)
        yield from (Message(rank, (number,), tuple(copies)) for rank, copies in of_ranks.items() if copies)

    def _given(self, number: int, parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
        """Parameters of which this rank gives something to a receiver."""
        home = self._homes[number]
        return tuple(p for p in parameters if self._rank in dict(self._holdings.holders(p, home)))

    def _copies(self, part: tuple[int, int], parameters: Sequence[Parameter], home: Home) -> Iterator[SlicedCopy]:
        for parameter in parameters:
            held = dict(self._holdings.holders(parameter, home))[self._rank]
            yield from self._holdings.copies(part, parameter, held)


class WeightStream:
    """Streams a role's weights to the receivers that want them.

    Memory beyond the weights: what a rank gets of a bucket, once as messages and once as tensors, so at most two
    buckets, or the largest tensor where that is larger; and what it sends of one.
    """

    def __init__(self, role: Role, bucket_bytes: int) -> None:
        """A collective of the world: the ranks of the first copy of everything say which parameters they hold.

        Raises RunError where there are parameters that none of them holds.
        """
        self.arch, options, grid = role.arch, role.options, role.placement.grid
        self.dtype, self.device, self._bucket_bytes = options.dtype, options.device, bucket_bytes
        self._here = {held.entry.megatron: held for held in role.mapped_parameters()}
        self._read = role.read_shard
        held = all_gather_objects(self._said(grid))
        stage_of = {name: s for s in range(grid.pp) for r in grid.stage_ranks(s) for name in held[r]}
        self._check_whole(stage_of, is_critic=options.is_critic)
        self.holdings = Holdings(self.arch, grid, options.padded_vocab, stage_of)
        itemsize = options.dtype.itemsize
        self.total_bytes = sum(p.elements * p.element_bytes(itemsize) for p in self.holdings.parameters)
        self.received_bytes = 0
        """Bytes that other ranks have sent to this one so far."""
        self._deliveries: dict[tuple[tuple[Receiver, ...], bool], Delivery] = {}
        # NCCL needs all ranks in the first operation of a group; later messages are between the ranks concerned alone.
        dist.all_reduce(torch.zeros(1, device=self.device))

    def _said(self, grid: Grid) -> list[str]:
        """Names of the parameters of which this rank has the first copy, so that every rank hears each name once or
        twice."""
        place = grid.place(dist.get_rank())
        if place is None:
            return []
        replica, _, context_rank, tensor_rank = place
        first_experts = grid.expert_place(replica, context_rank, tensor_rank)[0] == 0
        first = replica == context_rank == tensor_rank == 0
        return [n for n, held in self._here.items() if (first if held.entry.expert is None else first_experts)]

    def _check_whole(self, stage_of: dict[str, int], *, is_critic: bool) -> None:
        missing = [p.megatron for p in model_parameters(self.arch) if p.megatron not in stage_of]
        if missing and not (is_critic and missing == [OUTPUT_LAYER]):
            raise RunError(
                f"no rank holds {first_of(missing, 3)} of the model; install the versions that megappo asks for"
            )

    def delivery(self, receivers: Sequence[Receiver], *, shared: bool = False) -> Delivery:
        """The delivery to these receivers, which must be the same in the same order on every rank. See `Delivery`."""
        key = (tuple(receivers), shared)
        if key not in self._deliveries:
            made = Delivery(self.holdings, key[0], self._bucket_bytes, self.dtype, dist.get_rank(), shared=shared)
            self._deliveries[key] = made
        return self._deliveries[key]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) on every rank, in one order; a collective of the world, which all ranks
        must consume to its end."""
        return self.to([Receiver(rank) for rank in range(dist.get_world_size())])

    def to(self, receivers: Sequence[Receiver]) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of this rank's part, which may be empty; all ranks must consume it to its end."""
        delivery = self.delivery(receivers)
        for bucket in delivery.buckets:
            flats = {p.receiver: self.buffer(p.n_bytes) for p in bucket.payloads}
            self.deliver(delivery, bucket, flats)
            for payload in bucket.payloads:
                yield from payload.tensors(flats[payload.receiver]).items()

    def buffer(self, n_bytes: int) -> Tensor:
        """Allocate memory for a payload, which an engine's process can open."""
        with plain_segments():
            return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    def deliver(self, delivery: Delivery, bucket: Bucket, flats: Mapping[Receiver, Tensor]) -> None:
        """Send what other ranks want of a bucket, and fill the memory of this rank's receivers."""
        rank, receivers, shards = dist.get_rank(), delivery.receivers, dict[str, Tensor]()

        def part(copy: SlicedCopy) -> Tensor:
            name = copy.parameter.megatron
            if name not in shards:  # read once: an offloaded weight has to be fetched
                shards[name] = self._read(self._here[name]).to(bucket.dtype)
            return shards[name][copy.source]

        into = {payload.receiver: payload.tensors(flats[payload.receiver]) for payload in bucket.payloads}
        packed = {id(m): torch.cat([part(copy).flatten() for copy in m.copies]) for m in bucket.outgoing}
        operations = [dist.P2POp(dist.isend, packed[id(m)], receivers[number].rank) for number, m in bucket.sends]
        arriving = [(m, self._room(m, bucket.dtype)) for m in bucket.incoming if m.rank != rank]
        operations += [dist.P2POp(dist.irecv, flat, message.rank) for message, flat in arriving]
        # One batch: separate sends and receives of NCCL, in other orders on two ranks, would wait for each other.
        works = dist.batch_isend_irecv(operations) if operations else []
        for message in bucket.incoming:
            if message.rank == rank:
                for copy in message.copies:
                    into[receivers[message.receivers[0]]][copy.name][copy.target].copy_(part(copy))
        for work in works:
            work.wait()
        PROGRESS.add(WEIGHTS, sum(payload.n_bytes for payload in bucket.payloads))
        for message, flat in arriving:
            runs = flat.split([copy.elements for copy in message.copies])
            for copy, run in zip(message.copies, runs, strict=True):
                into[receivers[message.receivers[0]]][copy.name][copy.target].copy_(run.view(copy.shape))
            self.received_bytes += flat.nbytes

    def _room(self, message: Message, dtype: torch.dtype) -> Tensor:
        return torch.empty(message.elements, dtype=dtype, device=self.device)
