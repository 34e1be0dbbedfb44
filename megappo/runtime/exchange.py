"""Sends samples directly to the ranks that process them, and results back; no rank ever holds the whole batch.

All ranks know who sends what to whom, so sizes are not announced: an exchange is one all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Routes:
    """Ids of the tensors that this rank sends to each rank of the world, and receives from each, in sending order. The
    entries of sender and receiver for each other are the same."""

    outgoing: Sequence[Sequence[int]]
    incoming: Sequence[Sequence[int]]


def make_routes(
    sources: Mapping[int, int],
    destinations: Mapping[int, Collection[int]],
    *,
    ranks_of: Callable[[int], Sequence[int]] = lambda rank: (rank,),
    own: int | None,
) -> Routes:
    """Routes of this rank, where every id goes from one rank to some. All ranks pass the same arguments, in the same
    order.

    Args:
        sources: the rank that has each id.
        destinations: groups of ranks that receive each id, by number.
        ranks_of: the ranks of a group; by default a group is one rank.
        own: this rank's group, None where it is in none.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    outgoing: list[list[int]] = [[] for _ in range(world)]
    incoming: list[list[int]] = [[] for _ in range(world)]
    for i, source in sources.items():
        groups = destinations[i]
        if source == rank:
            for destination in (r for group in groups for r in ranks_of(group)):
                outgoing[destination].append(i)
        if own in groups:
            incoming[source].append(i)
    return Routes(outgoing, incoming)


def exchange(
    tensors: Mapping[int, Tensor],
    routes: Routes,
    sizes: Mapping[int, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[int, Tensor]:
    """Send `tensors` on their routes; a collective of the world.

    Args:
        tensors: what this rank sends, by id, of any shape, all on one device.
        routes: sender and receivers of each tensor; a tensor may go to several ranks or to none.
        sizes: number of elements of every tensor that arrives here, by id.
        dtype: of all tensors.
        device: where the collective runs.

    Returns:
        The tensors that arrived, by id, flat and in host memory.
    """
    pieces = [tensors[i].flatten() for ids in routes.outgoing for i in ids]
    outgoing = torch.cat(pieces).to(device, dtype) if pieces else torch.empty(0, dtype=dtype, device=device)
    incoming_ids = [i for ids in routes.incoming for i in ids]
    incoming = torch.empty(sum(sizes[i] for i in incoming_ids), dtype=dtype, device=device)
    dist.all_to_all_single(
        incoming,
        outgoing,
        [sum(sizes[i] for i in ids) for ids in routes.incoming],
        [sum(tensors[i].numel() for i in ids) for ids in routes.outgoing],
    )
    return dict(zip(incoming_ids, incoming.cpu().split([sizes[i] for i in incoming_ids]), strict=True))


def all_gather_varying(local: Tensor, *, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Gather tensors (n_r, ...) whose first dimension differs between ranks; same dtype and trailing shape."""
    world = dist.get_world_size(group)
    counts = torch.empty(world, 1, dtype=torch.int64, device=local.device)
    dist.all_gather(list(counts), torch.full((1,), len(local), device=local.device), group=group)
    sizes = counts.flatten().tolist()
    padded = local.new_zeros(max(sizes), *local.shape[1:])
    padded[: len(local)] = local
    gathered = padded.new_empty(world, *padded.shape)
    dist.all_gather(list(gathered), padded, group=group)
    return [of_rank[:n] for of_rank, n in zip(gathered, sizes, strict=True)]
