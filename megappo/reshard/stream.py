"""The weight stream. Converts the shards of a layout to Hugging Face tensors, or to the shards of engine ranks.

Weights are sent in buckets, directly from ranks with shards to receiving ranks (`slices`). No other rank takes part.
A receiver gets one contiguous byte range of each bucket, which contains its tensors in order. The bytes arrive in
messages. If all ranks are on one machine, each rank copies its slices into shared memory.
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
from megappo.observe.terminal.progress import PROGRESS, WEIGHTS
from megappo.reshard.slices import Holdings, Home, Receiver, SlicedCopy
from megappo.runtime.device import plain_segments
from megappo.runtime.ranks.objects import all_gather_objects

if TYPE_CHECKING:
    from megappo.megatron.roles import Role


class Slot(NamedTuple):
    """Place of a tensor in a payload."""

    name: str
    shape: Shape
    dtype: torch.dtype
    start: int
    """Offset of the first byte."""
    stop: int

    def view(self, flat_bytes: Tensor) -> Tensor:
        """Return a view of the tensor in the bytes of a payload."""
        return flat_bytes[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class ReceiverPayload:
    """The part of a bucket for one receiver: its tensors in one contiguous byte range."""

    receiver: Receiver
    parameters: tuple[Parameter, ...]
    slots: tuple[Slot, ...]

    @property
    def n_bytes(self) -> int:
        """Size of the payload."""
        return self.slots[-1].stop

    def tensors(self, flat_bytes: Tensor) -> dict[str, Tensor]:
        """Return views of the tensors in the bytes of the payload, by name."""
        return {slot.name: slot.view(flat_bytes) for slot in self.slots}


@dataclass(frozen=True)
class Message:
    """Slices that one rank sends to some receivers, in the order of the message."""

    rank: int
    """Rank that sends the slices."""
    receivers: tuple[int, ...]
    """Numbers of the receivers."""
    copies: tuple[SlicedCopy, ...]

    @property
    def elements(self) -> int:
        """Number of elements of the message."""
        return sum(copy.elements for copy in self.copies)


@dataclass(frozen=True)
class Bucket:
    """Parameters of one transfer, from the perspective of one rank."""

    payloads: tuple[ReceiverPayload, ...]
    """Payloads of the receivers of this rank."""
    dtype: torch.dtype
    """Type of all tensors of the bucket."""
    incoming: tuple[Message, ...]
    """Messages to receivers of this rank, each for one receiver. Messages from this rank to itself are included."""
    outgoing: tuple[Message, ...]
    """Messages to receivers of other ranks."""

    @property
    def sends(self) -> list[tuple[int, Message]]:
        """Each outgoing message with the number of a receiver, sorted by number. Both ranks use this order, and
        point-to-point messages are matched by order."""
        numbered = [(number, message) for message in self.outgoing for number in message.receivers]
        return sorted(numbered, key=lambda entry: entry[0])


class Delivery:
    """Transfer plan for the weights of a role and some receivers. The plan contains the data that this rank sends and
    receives in each bucket. The plan is created once."""

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
        """Create the plan. With `shared`, payloads are in memory that all ranks can access, and each rank writes its
        own shards."""
        self.receivers = tuple(receivers)
        self._holdings, self._dtype, self._rank, self._shared = holdings, dtype, rank, shared
        self._number = {p.megatron: number for number, p in enumerate(holdings.parameters)}
        self._homes = [holdings.home(receiver.rank) for receiver in receivers]
        self._mine = [n for n, receiver in enumerate(self.receivers) if shared or receiver.rank == rank]
        served = (n for n, home in enumerate(self._homes) if holdings.is_sender(rank, home))
        self._others = [n for n in served if n not in self._mine]
        cut = holdings.buckets(self.receivers, bucket_bytes // dtype.itemsize)
        made = (self._bucket(parameters) for parameters in cut)
        self.buckets = tuple(bucket for bucket in made if bucket.payloads or bucket.outgoing)
        """Buckets in which this rank sends or receives data."""

    def largest_bytes(self, part: tuple[int, int]) -> int:
        """Return the minimum bytes of a buffer for the receivers of this rank with this part."""
        payloads = (payload for bucket in self.buckets for payload in bucket.payloads)
        return max(payload.n_bytes for payload in payloads if payload.receiver.part == part)

    def _bucket(self, parameters: tuple[Parameter, ...]) -> Bucket:
        dtype = torch.float32 if parameters[0].wide else self._dtype
        payloads, incoming, outgoing = list[ReceiverPayload](), list[Message](), list[Message]()
        for number in self._mine:
            if chosen := self._chosen(number, parameters):
                payloads.append(self._payload(self.receivers[number], chosen, dtype))
                incoming += self._incoming(number, chosen)
        own = [p for p in parameters if self._holdings.has_shard(self._rank, p)]
        alike: dict[tuple[tuple[int, int], tuple[Parameter, ...]], list[int]] = {}
        for number in self._others:
            if sent := self._sent_parameters(number, self._chosen(number, own)):
                alike.setdefault((self.receivers[number].part, sent), []).append(number)
        for (part, sent), numbers in alike.items():
            if copies := tuple(self._copies(part, sent, self._homes[numbers[0]])):
                outgoing.append(Message(self._rank, tuple(numbers), copies))
        return Bucket(tuple(payloads), dtype, tuple(incoming), tuple(outgoing))

    def _chosen(self, number: int, parameters: Sequence[Parameter]) -> list[Parameter]:
        receiver = self.receivers[number]
        return [p for p in parameters if self._holdings.needs(receiver, self._number[p.megatron], p)]

    def _payload(self, receiver: Receiver, parameters: Sequence[Parameter], dtype: torch.dtype) -> ReceiverPayload:
        slots, start = [], 0
        for parameter in parameters:
            for piece in self._holdings.engine_pieces(receiver.part, parameter):
                whole = parameter.tensors[piece.name]
                shape = (*whole[: piece.dim], piece.size, *whole[piece.dim + 1 :])
                stop = start + math.prod(shape) * dtype.itemsize
                slots.append(Slot(piece.name, shape, dtype, start, stop))
                start = stop
        return ReceiverPayload(receiver, tuple(parameters), tuple(slots))

    def _incoming(self, number: int, parameters: Sequence[Parameter]) -> Iterator[Message]:
        of_ranks: dict[int, list[SlicedCopy]] = {}
        for parameter in parameters:
            for rank, shard in self._holdings.holders(parameter, self._homes[number]):
                if not self._shared or rank == self._rank:
                    copies = self._holdings.copies(self.receivers[number].part, parameter, shard)
                    of_ranks.setdefault(rank, []).extend(copies)
        yield from (Message(rank, (number,), tuple(copies)) for rank, copies in of_ranks.items() if copies)

    def _sent_parameters(self, number: int, parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
        """Return the parameters with data that this rank sends to a receiver."""
        home = self._homes[number]
        return tuple(p for p in parameters if self._rank in dict(self._holdings.holders(p, home)))

    def _copies(self, part: tuple[int, int], parameters: Sequence[Parameter], home: Home) -> Iterator[SlicedCopy]:
        for parameter in parameters:
            shard = dict(self._holdings.holders(parameter, home))[self._rank]
            yield from self._holdings.copies(part, parameter, shard)


class WeightStream:
    """Stream of the weights of a role to receivers.

    Additional memory: the received data of a bucket, once as messages and once as tensors, and the sent data of one
    bucket. The received data are at most two buckets, or the largest tensor if it is larger.
    """

    def __init__(self, role: Role, bucket_bytes: int) -> None:
        """Create the stream. This is a collective of the world, in which the ranks of the first copy report their
        parameters.

        Raises RunError if no rank has a parameter.
        """
        self.arch, options, grid = role.arch, role.options, role.placement.grid
        self.dtype, self.device, self._bucket_bytes = options.dtype, options.device, bucket_bytes
        self._mapped = {owned.entry.megatron: owned for owned in role.mapped_parameters()}
        self._read = role.read_shard
        owned = all_gather_objects(self._first_copy_names(grid))
        stage_of = {name: s for s in range(grid.pp) for r in grid.stage_ranks(s) for name in owned[r]}
        self._check_whole(stage_of, is_critic=options.is_critic)
        self.holdings = Holdings(self.arch, grid, options.padded_vocab, stage_of)
        itemsize = options.dtype.itemsize
        self.total_bytes = sum(p.elements * p.element_bytes(itemsize) for p in self.holdings.parameters)
        self.received_bytes = 0
        """Bytes received from other ranks so far."""
        self._deliveries: dict[tuple[tuple[Receiver, ...], bool], Delivery] = {}
        # NCCL requires all ranks in the first operation of a group. Later messages involve only the ranks concerned.
        dist.all_reduce(torch.zeros(1, device=self.device))

    def _first_copy_names(self, grid: Grid) -> list[str]:
        """Return the names of the parameters whose first copy is on this rank. Every rank therefore receives each
        name only once or twice."""
        place = grid.place(dist.get_rank())
        if place is None:
            return []
        replica, _, context_rank, tensor_rank = place
        first_experts = grid.expert_place(replica, context_rank, tensor_rank)[0] == 0
        first = replica == context_rank == tensor_rank == 0
        return [n for n, mapped in self._mapped.items() if (first if mapped.entry.expert is None else first_experts)]

    def _check_whole(self, stage_of: dict[str, int], *, is_critic: bool) -> None:
        missing = [p.megatron for p in model_parameters(self.arch) if p.megatron not in stage_of]
        if missing and not (is_critic and missing == [OUTPUT_LAYER]):
            raise RunError(
                f"no rank has {first_of(missing, 3)} of the model; install the versions that megappo requires"
            )

    def delivery(self, receivers: Sequence[Receiver], *, shared: bool = False) -> Delivery:
        """Return the delivery to these receivers. The receivers and their order must be the same on every rank. See
        `Delivery`."""
        key = (tuple(receivers), shared)
        if key not in self._deliveries:
            made = Delivery(self.holdings, key[0], self._bucket_bytes, self.dtype, dist.get_rank(), shared=shared)
            self._deliveries[key] = made
        return self._deliveries[key]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) on every rank, in the same order. A collective of the world. All
        ranks must consume the iterator to the end."""
        return self.to([Receiver(rank) for rank in range(dist.get_world_size())])

    def to(self, receivers: Sequence[Receiver]) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) of the part of this rank, possibly nothing. All ranks must consume the
        iterator."""
        delivery = self.delivery(receivers)
        for bucket in delivery.buckets:
            flats = {p.receiver: self.buffer(p.n_bytes) for p in bucket.payloads}
            self.deliver(delivery, bucket, flats)
            for payload in bucket.payloads:
                yield from payload.tensors(flats[payload.receiver]).items()

    def buffer(self, n_bytes: int) -> Tensor:
        """Allocate memory for a payload. Processes of an engine can open this memory."""
        with plain_segments():
            return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    def deliver(self, delivery: Delivery, bucket: Bucket, flats: Mapping[Receiver, Tensor]) -> None:
        """Send the data of a bucket to other ranks, and fill the memory of the receivers of this rank."""
        rank, receivers, shards = dist.get_rank(), delivery.receivers, dict[str, Tensor]()

        def part(copy: SlicedCopy) -> Tensor:
            name = copy.parameter.megatron
            if name not in shards:  # read once, because an offloaded weight must be fetched
                shards[name] = self._read(self._mapped[name]).to(bucket.dtype)
            return shards[name][copy.source]

        into = {payload.receiver: payload.tensors(flats[payload.receiver]) for payload in bucket.payloads}
        packed = {id(m): torch.cat([part(copy).flatten() for copy in m.copies]) for m in bucket.outgoing}
        operations = [dist.P2POp(dist.isend, packed[id(m)], receivers[number].rank) for number, m in bucket.sends]
        arriving = [(m, self._room(m, bucket.dtype)) for m in bucket.incoming if m.rank != rank]
        operations += [dist.P2POp(dist.irecv, flat, message.rank) for message, flat in arriving]
        # Use one batch. Separate sends and receives of NCCL in different orders on two ranks would deadlock.
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
