"""Samples travel straight to the ranks that process them, and results travel back.

No rank ever holds the whole batch. A sample is a row of ragged fields: one int64 vector and any number of float32
vectors; a rank hands over its rows with the ranks that should get them and receives the rows meant for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One sample on its way."""

    sample_id: int
    integers: Tensor
    """(n,) int64, for example token ids."""
    floats: Tensor
    """(F, m) float32: F fields of m numbers each."""


def _all_to_all(pieces: Sequence[Tensor], receive_sizes: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Send pieces[r] to rank r; returns what each rank sent here."""
    outgoing = torch.cat(list(pieces))
    incoming = outgoing.new_empty(sum(receive_sizes))
    dist.all_to_all_single(incoming, outgoing, list(receive_sizes), [len(p) for p in pieces], group=group)
    return list(incoming.split(list(receive_sizes)))


def exchange_rows(
    rows: Sequence[Row], destinations: Sequence[Sequence[int]], *, group: dist.ProcessGroup, device: torch.device
) -> list[Row]:
    """Deliver rows[i] to every rank in destinations[i]; a collective of all ranks of `group`.

    Args:
        rows: this rank's rows, on any device.
        destinations: for each row the ranks (within `group`) that get a copy.
        group: the ranks that take part; all of them must call.
        device: where the collective runs and where the result lies.

    Returns:
        The rows sent to this rank, ordered by sending rank, then by the sender's order.
    """
    world = dist.get_world_size(group)
    for_rank: list[list[Row]] = [[] for _ in range(world)]
    for row, ranks in zip(rows, destinations, strict=True):
        for rank in ranks:
            for_rank[rank].append(row)
    no_integers, no_floats = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float32)
    integers, floats = [], []
    for outgoing in for_rank:
        header = [[r.sample_id, r.integers.numel(), r.floats.shape[0], r.floats.shape[1]] for r in outgoing]
        parts = [torch.tensor([len(outgoing)]), torch.tensor(header, dtype=torch.int64).flatten()]
        parts += [r.integers.cpu() for r in outgoing]
        integers.append(torch.cat(parts).to(device))
        floats.append(torch.cat([no_floats, *(r.floats.flatten().cpu() for r in outgoing)]).to(device))

    sizes = torch.tensor([[len(i), len(f)] for i, f in zip(integers, floats, strict=True)], device=device)
    incoming_sizes = torch.empty_like(sizes)
    dist.all_to_all_single(incoming_sizes, sizes, group=group)
    integer_sizes, float_sizes = incoming_sizes.cpu().T.tolist()
    received: list[Row] = []
    integer_pieces = _all_to_all(integers, integer_sizes, group)
    float_pieces = _all_to_all(floats, float_sizes, group)
    for integer_piece, float_piece in zip(integer_pieces, float_pieces, strict=True):
        received += _unpack(integer_piece if len(integer_piece) else no_integers, float_piece)
    return received


def _unpack(integers: Tensor, floats: Tensor) -> list[Row]:
    """The rows of one sender: a count, a header of four numbers per row, then the integers of all rows."""
    count = int(integers[0])
    header = integers[1 : 1 + 4 * count].reshape(count, 4).tolist()
    tokens = integers[1 + 4 * count :].split([h[1] for h in header]) if count else ()
    values = floats.split([h[2] * h[3] for h in header]) if count else ()
    return [
        Row(sample_id, token_piece, value_piece.reshape(fields, width))
        for (sample_id, _, fields, width), token_piece, value_piece in zip(header, tokens, values, strict=True)
    ]


def all_gather_varying(local: Tensor, *, group: dist.ProcessGroup) -> list[Tensor]:
    """Gather tensors (n_r, ...) whose first dimension differs between ranks; same dtype and trailing shape."""
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=local.device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(local)], device=local.device), group=group)
    longest = max(int(s) for s in sizes)
    padded = local.new_zeros(longest, *local.shape[1:])
    padded[: len(local)] = local
    gathered = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded, group=group)
    return [g[: int(s)] for g, s in zip(gathered, sizes, strict=True)]
