"""Computation of the bytes that each rank of a large world receives and sends in a weight sync, from the plan of
slices.

The simulation sends no data, because the plan is a pure function of grids and parameters. The tests compare the plan
of a small world with the received bytes. Gigabytes are 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.config import Config, derive
from megappo.plan.bytes.sizes import model_sizes
from megappo.plan.inputs import make_setup
from megappo.plan.planner import default_machine, read_models
from megappo.plan.sync import received_bytes, receivers, sent_bytes


@dataclass(frozen=True)
class Simulated:
    """Traffic of a weight sync in a world of `ranks` ranks."""

    ranks: int
    servers: int
    model_gigabytes: float
    """Gigabytes per rank if every receiving rank received the whole model."""
    receiving_ranks: int
    """Ranks that feed servers or have an embedded engine."""
    received_bytes: list[int]
    """Bytes received by each rank."""
    sent_bytes: list[int]
    """Bytes that each rank sends to other ranks, without broadcasts to servers."""


def simulate(config: Config, folder: Path, worlds: Sequence[int]) -> Iterator[Simulated]:
    """Simulate one world for each number of ranks. Raises ConfigError if the settings do not support a world.

    `folder`: folder of the configuration. Its subfolder `models` may contain architectures.
    """
    models, machine = read_models(config, folder / "models").models, default_machine(config)
    for world in worlds:
        derive(config, world, models.actor, models.critic, models.reference)
        setup = make_setup(config, models, world, on_cuda=machine.is_cuda, device_bytes=machine.memory_bytes)
        node, settings = machine.devices_per_node, config.rollout.server_settings
        yield Simulated(
            world,
            settings.count_servers(world, on_cuda=machine.is_cuda)
            if config.rollout.capabilities.separate_processes
            else 0,
            setup.actor.dtype_bytes * model_sizes(setup.actor.arch)[0] / 1e9,
            len({receiver.rank for receiver in receivers(setup, node)}),
            list(received_bytes(setup, node).values()),
            list(sent_bytes(setup, node).values()),
        )


def show(worlds: Sequence[Simulated]) -> None:
    """Print the results as a Markdown table."""
    columns = ["ranks", "servers", "ranks that receive", "most GB received", "mean of all ranks", "least"]
    columns += ["most GB sent", "model in GB"]
    print("|", " | ".join(columns), "|")
    print("|", "---|" * len(columns), sep="")
    for world in worlds:
        received, sent = world.received_bytes, world.sent_bytes
        cells = [max(received), sum(received) / len(received), min(received), max(sent)]
        numbers = [world.ranks, world.servers, world.receiving_ranks, *(f"{n / 1e9:.4g}" for n in cells)]
        print("|", " | ".join(map(str, [*numbers, f"{world.model_gigabytes:.4g}"])), "|")
