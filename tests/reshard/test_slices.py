"""Slices of weights reach their receivers. The tests simulate each rank of small worlds without processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megappo.config.grid import Grid
from megappo.families.architecture import padded_vocab_size
from megappo.families.blocks import Attention, Experts, GatedMlp, QueryKeyNorms, QueryKeyValueBiases
from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import Parameter, model_parameters, pieces, tensor_shapes
from megappo.reshard.feeding import Feeding
from megappo.reshard.slices import Holdings, Receiver
from megappo.reshard.stream import Delivery
from tests.engines.test_sglang_parts import arch

DENSE = (Attention(), GatedMlp(), QueryKeyValueBiases(), QueryKeyNorms())
SPARSE = (Attention(), Experts())


class World:
    """All ranks of a world with the shards of a role. Counts the bytes that each rank receives from other ranks."""

    def __init__(self, model: ArchitectureConfig, grid: Grid, world: int) -> None:
        stage = {None: grid.pp - 1} | {layer: layer * grid.pp // model.layers for layer in range(model.layers)}
        stage_of = {p.megatron: stage[p.layer] for p in model_parameters(model)} | {EMBEDDING: 0}
        vocab = padded_vocab_size(model.vocab_size, grid.tp, 8)
        self.holdings, self.grid, self.world = Holdings(model, grid, vocab, stage_of), grid, world
        names = tensor_shapes(model)
        self.whole = {name: torch.randn(shape) for name, shape in names.items()}
        self.received = dict.fromkeys(range(world), 0)

    def shard(self, rank: int, parameter: Parameter) -> Tensor:
        """Return the shard of a rank. Raises KeyError if the rank has no shard of the parameter."""
        place = self.grid.place(rank)
        if place is None or place[1] != self.holdings.stage_of[parameter.megatron]:
            raise KeyError(rank)
        if parameter.expert is not None:
            _, expert_rank = self.grid.expert_place(place[0], *place[2:])
            if parameter.expert * self.grid.ep // self.holdings.arch.experts != expert_rank:
                raise KeyError(rank)
        slices = pieces(self.holdings.arch, parameter, place[3], self.grid.tp, self.holdings.padded_vocab)
        parts = [self.whole[s.name].narrow(s.dim, s.start, s.size) for s in slices]
        result = torch.cat(parts, slices[0].dim)
        if parameter.kind == "vocab":  # receivers must not get padding
            rows = self.holdings.padded_vocab // self.grid.tp - len(result)
            result = torch.cat([result, torch.full((rows, result.shape[1]), float("nan"))])
        return result

    def deliver(self, receivers: Sequence[Receiver], bucket_bytes: int) -> dict[Receiver, dict[str, Tensor]]:
        """Deliver all buckets, and return the tensors of each receiver."""
        ways = {
            rank: Delivery(self.holdings, receivers, bucket_bytes, torch.float32, rank) for rank in range(self.world)
        }
        messages: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for rank, way in ways.items():
            for bucket in way.buckets:
                for number, message in bucket.sends:
                    flat = torch.cat([self.shard(rank, c.parameter)[c.source].flatten() for c in message.copies])
                    messages[rank, receivers[number].rank].append(flat)
        result: dict[Receiver, dict[str, Tensor]] = {receiver: {} for receiver in receivers}
        for rank, way in ways.items():
            for bucket in way.buckets:
                flats = {p.receiver: torch.full((p.n_bytes,), 255, dtype=torch.uint8) for p in bucket.payloads}
                tensors = {p.receiver: p.tensors(flats[p.receiver]) for p in bucket.payloads}
                for message in bucket.incoming:
                    into = tensors[receivers[message.receivers[0]]]
                    if message.rank != rank:
                        flat = messages[message.rank, rank].pop(0)
                        self.received[rank] += flat.nbytes
                        assert len(flat) == message.elements
                        parts = list(flat.split([c.elements for c in message.copies]))
                    else:
                        parts = [self.shard(rank, c.parameter)[c.source].flatten() for c in message.copies]
                    for copy, part in zip(message.copies, parts, strict=True):
                        into[copy.name][copy.target] = part.view(copy.shape)
                for payload in bucket.payloads:
                    self.check_bound(payload.parameters, payload.n_bytes, bucket_bytes)
                    assert not result[payload.receiver].keys() & tensors[payload.receiver].keys()
                    result[payload.receiver] |= tensors[payload.receiver]
        assert not any(messages.values()), "sent messages must be received"
        return result

    @staticmethod
    def check_bound(parameters: Sequence[Parameter], n_bytes: int, bucket_bytes: int) -> None:
        assert n_bytes <= bucket_bytes or len(parameters) == 1


EMBEDDING = "embedding.word_embeddings.weight"


def engine_part(model: ArchitectureConfig, name: str, whole: Tensor, tp: int, rank: int) -> Tensor:
    """Return the slice of a tensor that an engine rank needs, computed independently."""
    last = name.split(".")[-2]
    if last in ("o_proj", "down_proj"):
        return whole.chunk(tp, dim=1)[rank]
    if last in ("embed_tokens", "lm_head"):
        padded = torch.zeros(192, whole.shape[1])
        padded[:131] = whole
        rows = len(padded) // tp
        return padded[rank * rows : (rank + 1) * rows][: max(0, 131 - rank * rows)]
    if last in ("k_proj", "v_proj"):
        heads = whole.view(2, 8, *whole.shape[1:])
        chosen = heads.repeat_interleave(max(1, tp // 2), 0).chunk(tp)[rank]
        return chosen.reshape(-1, *whole.shape[1:])
    if last in ("q_proj", "gate_proj", "up_proj"):
        return whole.chunk(tp)[rank]
    return whole


LAYOUTS: list[tuple[str, Grid, int]] = [
    ("one", Grid((0,), 1, 1), 1), ("tp2", Grid(range(2), 2, 1), 2), ("pp2", Grid(range(2), 1, 2), 2),
    ("dp2", Grid(range(2), 1, 1), 2), ("tp2-pp2", Grid(range(4), 2, 2), 4), ("tp2-pp2-dp2", Grid(range(8), 2, 2), 8),
    ("cp2-dp2", Grid(range(4), 1, 1, 1, 2), 4), ("ep2", Grid(range(2), 1, 1, 2), 2),
    ("ep4-tp2-dp2", Grid(range(4), 2, 1, 4), 4), ("ep2-pp2-dp4", Grid(range(8), 1, 2, 2), 8),
    ("ep4-cp2-pp2-dp2", Grid(range(8), 1, 2, 4, 2), 8), ("apart", Grid((1, 2, 4, 5), 2, 2), 7),
]  # fmt: skip


@pytest.mark.parametrize(("grid", "world"), [layout[1:] for layout in LAYOUTS], ids=[layout[0] for layout in LAYOUTS])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_only_receivers_get_their_slices(grid: Grid, world: int, tp: int) -> None:
    """Receivers get whole tensors or the slices of engines with two and four ranks, with repeated key and value heads.
    Receivers are all ranks or only the last rank, which can have no shard."""
    for blocks in (SPARSE,) if grid.ep > 1 else (DENSE, SPARSE):
        model = arch(*blocks, experts=4 if blocks == SPARSE else 0, layers=4)
        everywhere = [Receiver(rank, tp, rank % tp) for rank in range(world)]
        for receivers in (everywhere, everywhere[-1:]):
            simulated = World(model, grid, world)
            delivered = simulated.deliver(receivers, 4000)
            for receiver, tensors in delivered.items():
                assert tensors.keys() == simulated.whole.keys()
                for name, tensor in tensors.items():
                    expected = engine_part(model, name, simulated.whole[name], tp, receiver.tensor_rank)
                    assert torch.equal(tensor, expected), (receiver, name)
            for rank in range(world):
                planned = sum(simulated.holdings.sources(r, 4).total() for r in receivers if r.rank == rank)
                assert simulated.received[rank] == planned
                assert simulated.received[rank] == 0 or any(r.rank == rank for r in receivers)


def test_ranks_with_all_weights_receive_nothing() -> None:
    simulated = World(arch(*DENSE), Grid(range(4), 1, 1), 5)
    simulated.deliver([Receiver(rank) for rank in range(5)], 10_000)
    assert simulated.received == {0: 0, 1: 0, 2: 0, 3: 0, 4: sum(tensor.nbytes for tensor in simulated.whole.values())}


def test_stage_receivers_get_weights_of_their_stage() -> None:
    simulated = World(arch(*DENSE, layers=4), Grid(range(8), 2, 2), 8)
    delivered = simulated.deliver([Receiver(1, stage=0), Receiver(6, stage=1)], 4000)
    first, second = delivered.values()
    assert first.keys() | second.keys() == simulated.whole.keys() and not first.keys() & second.keys()
    assert "model.embed_tokens.weight" in first and "lm_head.weight" in second
    assert {rank for rank, received in simulated.received.items() if received} == {1, 6}
    bystander = Delivery(simulated.holdings, [Receiver(1, stage=0)], 4000, torch.float32, 2)
    assert bystander.buckets == ()  # a rank of the other stage
    assert Delivery(simulated.holdings, [Receiver(1, stage=0)], 4000, torch.float32, 4).buckets == ()  # another replica


def test_shares_cover_each_parameter_once() -> None:
    simulated = World(arch(*DENSE, layers=4), Grid(range(4), 2, 2), 4)
    shares = simulated.deliver([Receiver(rank, share=(rank, 4)) for rank in range(4)], 4000).values()
    assert sum(map(len, shares)) == len(simulated.whole) == len({name for share in shares for name in share})


@pytest.mark.parametrize("tp", [1, 2])
def test_one_replica_fills_shared_memory(tp: int) -> None:
    simulated = World(arch(*SPARSE, experts=4, layers=4), Grid(range(8), 2, 2, 2), 8)
    receivers = [Receiver(0, tp, r) for r in range(tp)]
    ways = [Delivery(simulated.holdings, receivers, 4000, torch.float32, rank, shared=True) for rank in range(8)]
    assert len({len(way.buckets) for way in ways}) == 1
    for buckets in zip(*(way.buckets for way in ways), strict=True):
        flats = {p.receiver: torch.full((p.n_bytes,), 255, dtype=torch.uint8) for p in buckets[0].payloads}
        assert sum(map(len, flats.values())) <= 4000 or len(buckets[0].payloads[0].parameters) == 1
        for rank, bucket in enumerate(buckets):
            assert not bucket.outgoing and (rank < 4 or not bucket.incoming)
            for message in bucket.incoming:
                (payload,) = (p for p in bucket.payloads if p.receiver == receivers[message.receivers[0]])
                for copy in message.copies:
                    part = simulated.shard(rank, copy.parameter)[copy.source]
                    payload.tensors(flats[payload.receiver])[copy.name][copy.target] = part
        for payload in buckets[0].payloads:
            for name, tensor in payload.tensors(flats[payload.receiver]).items():
                expected = engine_part(
                    simulated.holdings.arch, name, simulated.whole[name], tp, payload.receiver.tensor_rank
                )
                assert torch.equal(tensor, expected)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    tp, pp, cp, dp = (draw(st.sampled_from([1, 2])) for _ in range(4))
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if tp * cp * dp % n == 0]))
    ranks = sorted(draw(st.permutations(range(18)))[: tp * pp * cp * dp])
    return Grid(ranks, tp, pp, ep, cp)


@settings(max_examples=25, deadline=None)
@given(grids(), st.sampled_from([1, 2, 4]), st.integers(1, 20_000))
def test_any_layout_in_any_world(grid: Grid, tp: int, bucket_bytes: int) -> None:
    simulated = World(arch(*SPARSE, experts=4, layers=2), grid, 18)
    receivers = [Receiver(rank, tp, rank % tp) for rank in range(0, 18, 5)]
    for receiver, tensors in simulated.deliver(receivers, bucket_bytes).items():
        for name, tensor in tensors.items():
            expected = engine_part(simulated.holdings.arch, name, simulated.whole[name], tp, receiver.tensor_rank)
            assert torch.equal(tensor, expected)


def test_all_ranks_of_a_replica_send_evenly() -> None:
    """Buckets alternate between stages and expert owners. No rank sends much more than an equal part of a bucket."""
    simulated = World(arch(*SPARSE, experts=16, layers=4), Grid(range(8), 1, 2, 4), 8)
    receivers = [Receiver(rank, 2, rank % 2) for rank in range(8)]
    ways = [Delivery(simulated.holdings, receivers, 20_000, torch.float32, rank) for rank in range(8)]
    assert len({len(way.buckets) for way in ways}) == 1 and len(ways[0].buckets) > 3
    for number in range(1, len(ways[0].buckets) - 1):  # the first and last buckets have the vocabulary
        sent = [sum(message.elements for _, message in way.buckets[number].sends) for way in ways]
        assert min(sent) > 0 and max(sent) < 2.5 * sum(sent) / 8


def test_one_layer_per_stage_has_the_same_totals() -> None:
    model = arch(*SPARSE, experts=4, layers=6)
    grid, vocab = Grid(range(4), 2, 2, 2), padded_vocab_size(131, 2, 8)
    stage_of = {p.megatron: 1 if p.layer is None else int(p.layer >= 4) for p in model_parameters(model)}
    real = Holdings(model, grid, vocab, {**stage_of, EMBEDDING: 0})
    planned = Holdings.planned(model, grid, vocab, (4, 2))
    for rank in range(6):
        for receiver in (Receiver(rank), Receiver(rank, 4, rank % 4), Receiver(rank, stage=1)):
            assert planned.sources(receiver, 2).total() == real.sources(receiver, 2).total()
    assert [planned.stage_bytes(s, 2) for s in (0, 1)] == [real.stage_bytes(s, 2) for s in (0, 1)]


def feeding(hosts: Sequence[int], tp: int, **changes: Any) -> Feeding:
    return Feeding(tuple(hosts), tp, **({"colocated": True, "on_cuda": True, "sliced": tp > 1} | changes))


def test_feeders_of_colocated_servers() -> None:
    """The feeders are the trainer ranks on the devices of the server."""
    two_nodes = [0] * 8 + [1] * 8
    grid = Grid(range(16), 4, 2)
    assert feeding(two_nodes, 4).sender(3) == 12
    assert feeding(two_nodes, 4).feeders(3, grid) == tuple(Receiver(12 + r, 4, r) for r in range(4))
    assert feeding(two_nodes, 1).feeders(5, grid) == (Receiver(5),)
    assert feeding(two_nodes, 4, sliced=False).feeders(3, grid) == (Receiver(12),)
    beyond = feeding([0] * 2, 4).feeders(0, Grid(range(2), 2, 1))  # a server with more ranks than trainers
    assert beyond == (Receiver(0, 4, 0), Receiver(1, 4, 1), Receiver(0, 4, 2), Receiver(0, 4, 3))


def test_feeders_of_servers_on_several_machines() -> None:
    """On the GPUs of the trainers, each rank feeds the server rank on the same GPU. Without slices, the first rank of
    each machine feeds the server ranks of the machine. Other servers use the first machines."""
    hosts, grid = [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4, Grid(range(16), 4, 2)
    large = feeding(hosts, 8, nodes=2)
    assert large.starters(1) == (8, 12) and large.sender(1) == 8 and large.problem(1) is None
    assert large.feeders(1, grid) == tuple(Receiver(8 + r, 8, r) for r in range(8))
    assert [large.opening(1, rank) for rank in (8, 12, 9)] == [range(4), range(4, 8), range(8, 8)]
    assert feeding(hosts, 8, nodes=2, sliced=False).feeders(1, grid) == (Receiver(8), Receiver(12))
    apart = feeding(hosts, 8, nodes=2, colocated=False)
    assert apart.starters(1) == (1, 5) and apart.feeders(1, grid) == (Receiver(1, stage=0), Receiver(1, stage=1))
    without_gpus = feeding([0, 1], 4, nodes=2, on_cuda=False)
    assert without_gpus.feeders(0, Grid(range(2), 2, 1)) == tuple(
        Receiver(rank, 4, r) for r, rank in enumerate((0, 0, 1, 1))
    )


def test_server_placement_problems_are_reported() -> None:
    hosts = [0] * 4 + [1] * 4
    assert feeding(hosts, 8, nodes=2).problem(0) is None
    problem = feeding(hosts, 4, nodes=2).problem(1)
    assert problem == "the ranks 4 to 7 on its devices are not 2 on each of 2 machines"
    assert "the ranks 0 to 15 on its devices" in (feeding(hosts, 16, nodes=2).problem(0) or "")
    assert feeding(hosts, 4, nodes=4, colocated=False).problem(0) == "the trainers have 2 machines"
    assert feeding([0], 2, nodes=2, on_cuda=False).problem(0) == "the trainers have 1 machine"
    assert feeding(hosts, 16, nodes=4, colocated=False, anywhere=True).problem(0) is None


def test_feeders_of_disaggregated_servers() -> None:
    """One rank of each stage feeds a server. The rank is on the first machine if only this machine reaches the servers.
    Otherwise each server has different feeders."""
    hosts, grid = [0] * 4 + [1] * 4, Grid(range(8), 2, 2)
    everywhere = feeding(hosts, 2, colocated=False, anywhere=True)
    assert [everywhere.feeders(i, grid) for i in (0, 1, 5)] == [
        (Receiver(0, stage=0), Receiver(2, stage=1)),
        (Receiver(1, stage=0), Receiver(3, stage=1)),
        (Receiver(1, stage=0), Receiver(3, stage=1)),
    ]
    assert everywhere.feeders(2, grid) == (Receiver(4, stage=0), Receiver(6, stage=1))
    own = feeding(hosts, 2, colocated=False)
    assert own.feeders(2, grid) == own.feeders(0, grid) == (Receiver(0, stage=0), Receiver(2, stage=1))
    second = own.feeders(1, Grid(range(4, 8), 1, 2))  # the actor is only on the other machine
    assert second == (Receiver(1, stage=0), Receiver(1, stage=1))


def test_cpu_ranks_of_one_machine_share_memory() -> None:
    shared = feeding([0, 0], 2, on_cuda=False)
    assert shared.shares_memory and shared.feeders(1, Grid(range(2), 2, 1)) == (Receiver(1, 2, 0), Receiver(1, 2, 1))
    assert not feeding([0, 1], 2, on_cuda=False).shares_memory
    assert not feeding([0, 0], 2, on_cuda=False, colocated=False).shares_memory
