"""Bytes that each rank receives in a weight sync, computed from the slice plan of the weight sync."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megappo.config.grid import Grid
from megappo.families.declaration import ArchitectureConfig
from megappo.plan.bytes.servers import server_weights
from megappo.plan.bytes.sizes import model_sizes
from megappo.plan.inputs import Setup
from megappo.reshard.feeding import Feeding
from megappo.reshard.slices import Holdings, Receiver, copy_ranks

_SAMPLED_RANKS = 8
"""Number of receivers for which bytes are counted. Each count visits all parameters of the model, so counting every
rank of a large run would be slow."""


@dataclass(frozen=True)
class SyncTraffic:
    """Bytes of one weight sync on the busiest rank."""

    received: float
    """Bytes received from other ranks."""
    made: float
    """Bytes of the tensors that the rank assembles."""
    broadcast: float
    """Bytes broadcast to servers on other devices."""


def sync_traffic(setup: Setup, ranks_per_node: int) -> SyncTraffic:
    """Return the traffic of the busiest rank. The busiest rank is chosen from a sample of evenly spaced receivers."""
    feeding_ranks, holdings = receivers(setup, ranks_per_node), _holdings_of(setup)
    arch, servers, e = setup.actor.arch, setup.work.servers, setup.actor.dtype_bytes
    whole = float(e * model_sizes(arch)[0])
    ranks = sorted({receiver.rank for receiver in feeding_ranks})
    sampled = {*ranks[:: max(1, len(ranks) // _SAMPLED_RANKS)], *ranks[-1:]}
    received = float(max(received_bytes(setup, ranks_per_node, sampled).values(), default=0))
    if servers is None:
        return SyncTraffic(received, whole, 0.0)
    if servers.colocated and not feeding_ranks:  # each rank writes its part of one copy
        return SyncTraffic(received, whole / min(setup.work.world_size, copy_ranks(setup.actor.grid)), 0.0)
    if servers.colocated:
        return SyncTraffic(
            received, e * server_weights(arch, servers.tensor_parallel) if servers.sliced else whole, 0.0
        )
    stages = {stage: float(holdings.stage_bytes(stage, e)) for stage in range(setup.actor.grid.pp)}
    made, sent = Counter[int](), Counter[int]()
    for receiver in feeding_ranks:
        made[receiver.rank] += int(stages[receiver.stage or 0])
    for feeder in _feeders(setup, ranks_per_node):
        sent[feeder.rank] += int(stages[feeder.stage or 0])
    return SyncTraffic(received, float(max(made.values())), float(max(sent.values())))


def receivers(setup: Setup, ranks_per_node: int) -> list[Receiver]:
    """Return the ranks that receive weights.

    With the embedded engine, every rank receives weights. With servers, only the ranks that feed a server receive
    weights. The list is empty if servers read from shared memory to which all ranks write.
    """
    if setup.work.servers is None:
        return [Receiver(rank) for rank in range(setup.work.world_size)]
    return list(dict.fromkeys(_feeders(setup, ranks_per_node)))


def _feeders(setup: Setup, ranks_per_node: int) -> Sequence[Receiver]:
    """Return the ranks that feed each server."""
    servers, feeding = setup.work.servers, _feeding(setup, ranks_per_node)
    assert servers is not None
    return () if feeding.shares_memory else _feeders_of_all(feeding, servers.count, setup.actor.grid)


@lru_cache(maxsize=256)
def _feeders_of_all(feeding: Feeding, servers: int, grid: Grid) -> tuple[Receiver, ...]:
    """Return the ranks that feed each server. The result is cached because a search requests the same ranks for many
    variants of a layout."""
    return tuple(receiver for index in range(servers) for receiver in feeding.feeders(index, grid))


def misplaced_server(setup: Setup, ranks_per_node: int) -> str | None:
    """Return a message if the first server does not fit on nodes with `ranks_per_node` devices. Return None if the
    server fits."""
    servers = setup.work.servers
    if servers is None or not setup.work.on_cuda:
        return None
    ranks = servers.tensor_parallel // servers.nodes
    if ranks > ranks_per_node:
        nodes = -(-servers.tensor_parallel // ranks_per_node)
        return (
            f"rollout.servers.tensor_parallel {servers.tensor_parallel} puts {ranks} ranks of a server on a node, "
            f"which has {ranks_per_node} devices; set rollout.servers.nodes to {nodes}, or lower tensor_parallel"
        )
    problem = _feeding(setup, ranks_per_node).problem(0)
    return (
        None if problem is None else f"rollout.servers.nodes is {servers.nodes}, but {problem}; choose another number"
    )


def _feeding(setup: Setup, ranks_per_node: int) -> Feeding:
    """Return the assignment of ranks to servers. If a node has too few devices for the servers, the plan assumes that
    the servers are started separately and listed in `rollout.servers.urls`."""
    servers, world = setup.work.servers, setup.work.world_size
    assert servers is not None
    apart = servers.has_own_devices and servers.ranks > ranks_per_node
    return Feeding(
        tuple(0 if servers.shares_machine else rank // ranks_per_node for rank in range(world)),
        servers.tensor_parallel,
        colocated=servers.colocated,
        on_cuda=setup.work.on_cuda,
        sliced=servers.sliced,
        anywhere=servers.reached_from_everywhere or apart,
        nodes=servers.nodes,
    )


def received_bytes(setup: Setup, ranks_per_node: int, ranks: Collection[int] | None = None) -> dict[int, int]:
    """Return the bytes that each rank, or each rank in `ranks`, receives from other ranks."""
    n_bytes = dict.fromkeys(range(setup.work.world_size) if ranks is None else ranks, 0)
    for receiver in receivers(setup, ranks_per_node):
        if receiver.rank in n_bytes:
            n_bytes[receiver.rank] += sum(_sources(_holdings_of(setup), receiver, setup.actor.dtype_bytes).values())
    return n_bytes


def sent_bytes(setup: Setup, ranks_per_node: int) -> dict[int, int]:
    """Return the bytes that each rank sends to other ranks."""
    n_bytes = dict.fromkeys(range(setup.work.world_size), 0)
    for receiver in receivers(setup, ranks_per_node):
        for rank, received in _sources(_holdings_of(setup), receiver, setup.actor.dtype_bytes).items():
            n_bytes[rank] += received
    return n_bytes


def _holdings_of(setup: Setup) -> Holdings:
    actor = setup.actor
    return _holdings(actor.arch, actor.grid, actor.padded_vocab, actor.stage_layers)


@lru_cache(maxsize=64)
def _holdings(arch: ArchitectureConfig, grid: Grid, padded_vocab: int, stage_layers: tuple[int, ...]) -> Holdings:
    return Holdings.planned(arch, grid, padded_vocab, stage_layers)


@lru_cache(maxsize=4096)
def _sources(holdings: Holdings, receiver: Receiver, element_bytes: int) -> Counter[int]:
    return holdings.sources(receiver, element_bytes)
