"""Exchanges rows between ranks and checks what arrives; see test_exchange.py."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megappo.runtime.exchange import Row, all_gather_varying, exchange_rows
from megappo.runtime.tally import Tally


def row(sample_id: int) -> Row:
    """A row whose content follows from its id; some are empty."""
    g = torch.Generator().manual_seed(sample_id)
    fields, width = sample_id % 3, sample_id % 4
    return Row(sample_id, torch.randint(0, 9, (sample_id % 5,), generator=g), torch.randn(fields, width, generator=g))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    # Rank r holds ids r, r + world, ...; id i goes to ranks i % world and (i + 1) % world; rank 2 holds nothing.
    held = [i for i in range(rank, 40, world) if rank != 2]
    sent = exchange_rows(
        [row(i) for i in held], [sorted({i % world, (i + i % 2) % world}) for i in held], group=group, device=cpu
    )
    wanted = [i for i in range(40) if i % world != 2 and rank in (i % world, (i + i % 2) % world)]
    assert sorted(r.sample_id for r in sent) == wanted, (rank, sent)
    for received in sent:
        truth = row(received.sample_id)
        assert torch.equal(received.integers, truth.integers)
        assert torch.equal(received.floats, truth.floats)
        assert received.floats.shape == truth.floats.shape
    nothing = exchange_rows([], [], group=group, device=cpu)
    assert nothing == []
    gathered = all_gather_varying(torch.full((rank, 2), rank), group=group)
    assert [tuple(g.shape) for g in gathered] == [(r, 2) for r in range(world)]
    assert all((g == r).all() for r, g in enumerate(gathered))
    tally = Tally()
    tally.mean_and_std("x", torch.arange(rank + 1).float())
    tally.maximum("top", torch.tensor([float(rank)]))
    tally.minimum("low", torch.tensor([float(rank), 7.0]))
    tally.total("count", 2.0)
    tally.mean("empty", torch.empty(0))
    numbers = tally.reduce(None, cpu)
    values = torch.cat([torch.arange(r + 1).float() for r in range(world)])
    assert abs(numbers["x/mean"] - values.mean()) < 1e-6
    assert abs(numbers["x/std"] - values.std(unbiased=False)) < 1e-6
    assert (numbers["top"], numbers["low"], numbers["count"]) == (world - 1, 0, 2 * world)
    assert numbers["empty"] != numbers["empty"]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
