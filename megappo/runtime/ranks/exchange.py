"""Direct exchange of samples and results between ranks. No rank has the whole batch.

All ranks know the routes and sizes in advance. An exchange is therefore a single all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Routes:
    """Ids of the tensors that this rank sends to each rank of the world, and receives from each, in sending order.

    The outgoing ids of a sender equal the incoming ids of the receiver.
    """

    outgoing: Sequence[Sequence[int]]
    incoming: Sequence[Sequence[int]]


def make_routes(
    sources: Mapping[int, int],
    destinations: Mapping[int, Collection[int]],
    *,
    ranks_of: Callable[[int], Sequence[int]] = lambda rank: (rank,),
    own: int | None,
) -> Routes:
    """Return the routes of this rank. All ranks pass the same arguments in the same order, except `own`.

    Args:
        sources: source rank of each id.
        destinations: numbers of the groups that receive each id.
        ranks_of: ranks of a group; by default a group is one rank.
        own: group of this rank; None if this rank is in no group.
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
    """Send `tensors` along their routes; a collective of the world.

    Args:
        tensors: outgoing tensors of this rank by id, of any shape, all on one device.
        routes: sender and receivers of each tensor; a tensor may have several receivers or none.
        sizes: number of elements of every incoming tensor, by id.
        dtype: dtype of all tensors.
        device: device of the collective.

    Returns:
        The incoming tensors by id, flattened, in host memory.
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
    """Gather tensors (n_r, ...) whose first dimension differs between ranks. Dtype and other dimensions are equal."""
    world = dist.get_world_size(group)
    counts = torch.empty(world, 1, dtype=torch.int64, device=local.device)
    dist.all_gather(list(counts), torch.full((1,), len(local), device=local.device), group=group)
    sizes = counts.flatten().tolist()
    padded = local.new_zeros(max(sizes), *local.shape[1:])
    padded[: len(local)] = local
    gathered = padded.new_empty(world, *padded.shape)
    dist.all_gather(list(gathered), padded, group=group)
    return [of_rank[:n] for of_rank, n in zip(gathered, sizes, strict=True)]
