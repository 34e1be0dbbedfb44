"""Exchange tensors between ranks and check the received tensors; see test_exchange.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megappo.engines.absent import AbsentEngine
from megappo.engines.protocol import SyncReport
from megappo.ppo.reports.measures import sync_metrics
from megappo.runtime.ranks.exchange import all_gather_varying, exchange, make_routes
from megappo.runtime.ranks.objects import agreed, all_gather_objects, broadcast_object
from megappo.runtime.ranks.tally import Tally


def content(i: int) -> torch.Tensor:
    """Return a tensor that depends only on its id. Some tensors are empty."""
    return torch.randn(i % 3, i % 4, generator=torch.Generator().manual_seed(i))


def agreed_problem(fails_on: set[int]) -> str:
    """Return the error message on this rank if some ranks cannot read a file."""

    def work() -> None:
        if dist.get_rank() in fails_on:
            raise OSError("no room")

    try:
        agreed(work)
    except ValueError as error:
        return str(error)
    return ""


def check_sync(rank: int, world: int) -> None:
    """Check that the slowest rank defines the phases and the speed of a sync. The phases of all attempts are added.
    The speed is that of the last attempt. A run without an engine has no transfer."""
    parts: Any = SimpleNamespace(weights=SimpleNamespace(total_bytes=6e9))
    attempts = [
        {"gather": 0.5, "transfer": 99.0},
        {"gather": 0.5 + rank, "load": 9.0 - rank, "transfer": 1.0 + rank},
    ]
    metrics = sync_metrics(parts, 20.0 + rank, SyncReport.gather(attempts), 7)
    assert metrics == {
        "sync/seconds": 19.0 + world, "sync/transfer_seconds": float(world), "sync/version": 7.0,
        "sync/gather_seconds": float(world), "sync/load_seconds": 9.0, "sync/gigabytes_per_second": 6.0 / world,
    }, metrics  # fmt: skip
    stream: Any = ()
    report = AbsentEngine().update_weights(stream, 8)
    assert sync_metrics(parts, 0.5, report, 8) == {"sync/seconds": 0.5, "sync/version": 8.0}


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    # Rank r has ids r, r + world, ...; id i goes to rank i % world and, if odd, also to (i + 1) % world; rank 2 has
    # none.
    sources = {i: i % world for i in reversed(range(40)) if i % world != 2}
    destinations = {i: {i % world, (i + i % 2) % world} for i in sources}
    sizes = {i: content(i).numel() for i in sources}
    mine = {i: content(i) for i, source in sources.items() if source == rank}
    received = exchange(mine, make_routes(sources, destinations, own=rank), sizes, dtype=torch.float32, device=cpu)
    assert received.keys() == {i for i in sources if rank in destinations[i]}, (rank, received.keys())
    assert all(torch.equal(tensor, content(i).flatten()) for i, tensor in received.items())
    assert exchange({}, make_routes({}, {}, own=rank), {}, dtype=torch.int64, device=cpu) == {}
    assert broadcast_object(f"of {rank}", src=1) == "of 1"
    assert all_gather_objects((rank,)) == [(r,) for r in range(world)]
    assert agreed(lambda: rank) == rank
    for fails_on, message in (({1}, "no room (on rank 1, but not on every rank)"), (set(range(world)), "no room")):
        problem = agreed_problem(fails_on)
        assert problem == message, (rank, problem)
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
    check_sync(rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
