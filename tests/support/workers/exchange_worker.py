"""Exchanges tensors between ranks and checks what arrives; see test_exchange.py."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megappo.runtime.exchange import all_gather_varying, exchange, make_routes
from megappo.runtime.objects import agreed, all_gather_objects, broadcast_object
from megappo.runtime.tally import Tally


def content(i: int) -> torch.Tensor:
    """A tensor that follows from its id; some are empty."""
    return torch.randn(i % 3, i % 4, generator=torch.Generator().manual_seed(i))


def agreed_problem(fails_on: set[int]) -> str:
    """What this rank is told where some ranks cannot read a file."""

    def work() -> None:
        if dist.get_rank() in fails_on:
            raise OSError("no room")

    try:
        agreed(work)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    # Rank r holds ids r, r + world, ...; id i goes to ranks i % world and, if odd, (i + 1) % world; rank 2 holds none.
    sources = {i: i % world for i in reversed(range(40)) if i % world != 2}
    destinations = {i: {i % world, (i + i % 2) % world} for i in sources}
    sizes = {i: content(i).numel() for i in sources}
    mine = {i: content(i) for i, source in sources.items() if source == rank}
    found = exchange(mine, make_routes(sources, destinations, own=rank), sizes, dtype=torch.float32, device=cpu)
    assert found.keys() == {i for i in sources if rank in destinations[i]}, (rank, found.keys())
    assert all(torch.equal(tensor, content(i).flatten()) for i, tensor in found.items())
    assert exchange({}, make_routes({}, {}, own=rank), {}, dtype=torch.int64, device=cpu) == {}
    assert broadcast_object(f"of {rank}", src=1) == "of 1"
    assert all_gather_objects((rank,)) == [(r,) for r in range(world)]
    assert agreed(lambda: rank) == rank
    for fails_on, words in (({1}, "no room (on rank 1, not on every other)"), (set(range(world)), "no room")):
        said = agreed_problem(fails_on)
        assert said == words, (rank, said)
    gathered = all_gather_varying(torch.full((rank, 2), rank), group=group)
    assert [tuple(g.shape) for g in gathered] == [(r, 2) for r in range(world)]
    assert all((g == r).all() for r, g in enumerate(gathered))
    tally = Tally()
    tally.mean_and_std("x", torch.arange(rank + 1).float())
    tally.maximum("top", torch.tensor([float(rank)]))
    tally.minimum("low", torch.tensor([float(rank), 7.0]))
    tally.total("count", 2.0)
    tally.mean("empty", torch.empty(0))
    numbers = tally.reduce(cpu)
    values = torch.cat([torch.arange(r + 1).float() for r in range(world)])
    assert abs(numbers["x/mean"] - values.mean()) < 1e-6
    assert abs(numbers["x/std"] - values.std(unbiased=False)) < 1e-6
    assert (numbers["top"], numbers["low"], numbers["count"]) == (world - 1, 0, 2 * world)
    assert "empty" not in numbers
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
