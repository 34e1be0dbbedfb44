"""Output of a plan for terminals and as JSON.

In the memory table, a GB is 1e9 bytes. `activ.` is the memory of activations that the forward pass keeps for the
backward pass. `head` and `layer` are the workspaces of the output layer and of the running layer. `adds` is the
largest amount that any stage adds to the resident memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megappo.config.grid import format_rank_list
from megappo.plan.bytes.memory import RankMemory
from megappo.plan.choices import OpenSetting
from megappo.plan.engines import OtherEngine
from megappo.plan.planner import Plan
from megappo.plan.search import Proposal

_GIGA = 1e9


def to_json(
    plan: Plan | None,
    proposals: Sequence[Proposal],
    notes: Sequence[str],
    other: OtherEngine | None = None,
    chosen: Sequence[OpenSetting] = (),
) -> str:
    """Return a plan as JSON, in bytes, FLOPs and seconds.

    The keys are `plan` and `other_engine` (null in a search), `layouts` (the proposals), `choices` (the unset
    settings) and `notes`. Each entry of `plan.ranks` has `peak_stage` and `peak_bytes` in addition to its parts.
    """
    content: dict[str, Any] = {"plan": None}
    if plan is not None:
        content["plan"] = dataclasses.asdict(plan)
        for entry, ranks in zip(content["plan"]["ranks"], plan.ranks, strict=True):
            entry |= {"peak_stage": ranks.peak_stage, "peak_bytes": ranks.peak}
    content["other_engine"] = None if other is None else dataclasses.asdict(other)
    content |= {"layouts": [dataclasses.asdict(p) for p in proposals]}
    content |= {"choices": [dataclasses.asdict(c) for c in chosen], "notes": list(notes)}
    return json.dumps(content, indent=2)


def plan_view(plan: Plan) -> RenderableType:
    """Return tables of the memory on the ranks with the highest peak and of the stages."""
    tables = [_memory_table(plan), _stage_table(plan)]
    if any(role.host for role in plan.fullest_trainers.roles):
        tables.append(_host_table(plan))
    return Group(*tables)


def search_view(proposals: Sequence[Proposal], gpus: int, machine: str) -> RenderableType:
    """Return a table of the proposed layouts, from fastest to slowest."""
    table = Table(title=f"layouts on {gpus} x {machine}, the fastest first", title_justify="left", show_lines=True)
    table.add_column("s/step", justify="right", no_wrap=True)
    table.add_column("peak GB", justify="right", no_wrap=True)
    table.add_column("layout and overrides", overflow="fold")
    for proposal in proposals:
        layouts = "\n".join(f"{name}: {layout}" for name, layout in proposal.roles.items())
        table.add_row(
            f"{proposal.step_seconds:.1f}",
            f"{proposal.peak_bytes / _GIGA:.1f}",
            Text(f"{layouts}\n{' '.join(proposal.overrides) or 'no changes to the configuration'}"),
        )
    return table


def _table(title: str, first: str, *numbers: str) -> Table:
    """Return a table without rows that has a column of names and columns of numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _memory_table(plan: Plan) -> Table:
    """Return a table with one row per role on the ranks with the highest peak: resident memory and the memory that a
    stage adds."""
    ranks: RankMemory = plan.fullest_trainers
    unit, size = ("GB", _GIGA) if plan.fullest.peak >= _GIGA else ("MB", 1e6)
    more = f" and {plan.server_gpus} of servers" if plan.server_gpus else ""
    if plan.reward_servers:
        more += f" and {sum(server.ranks for server in plan.reward_servers)} of rewards"
    where = format_rank_list(ranks.ranks)
    title = f"{plan.name} on {plan.gpus} x {plan.machine}{more}: {unit} on {where}, the highest peak"
    table = _table(title, "", "weights", "grads", "optimizer", "activ.", "head", "layer", "adds")

    def cells(*numbers: float) -> list[str]:
        return [_short(n / size) if n else "" for n in numbers]

    for role in ranks.roles:
        stays = (role.weights, role.gradients, role.optimizer)
        adds = (role.activations, role.head, role.transient, max(role.update, role.forward))
        table.add_row(role.role, *cells(*stays, *adds))
    for holder in (ranks, *(r for r in plan.ranks if r.of_servers)):
        engine = holder.engine
        if engine.total:
            name = "server" if holder.of_servers else "engine"
            table.add_row(name, *cells(engine.weights, 0, 0, 0, 0, 0, engine.kv_cache + engine.workspace))
    for server in plan.reward_servers:
        table.add_row(server.name, *cells(server.weights, 0, 0, 0, 0, 0, server.kv_cache))
    if ranks.reward:
        table.add_row("reward", *cells(ranks.reward, 0, 0, 0, 0, 0, 0))
    table.add_row("sync", *cells(0, 0, 0, 0, 0, 0, ranks.sync))
    return table


def _stage_table(plan: Plan) -> Table:
    """Return a table with one row per stage of a step."""
    rate = f"{plan.tokens_per_second:.3g} tokens/s"
    title = f"a step of {plan.step_seconds:.3g} s, {rate}; FLOP of all ranks, bytes of one"
    table = _table(title, "stage", "peak B", "FLOP", "memory B", "links B", "seconds")
    table.add_column("bound by", no_wrap=True)
    for stage in plan.stages:
        peak = max(ranks.stages.get(stage.name, 0.0) for ranks in plan.ranks)
        numbers = (peak, stage.flops, stage.memory_bytes, stage.link_bytes)
        table.add_row(stage.name, *map(_prefixed, numbers), _short(stage.seconds), stage.bound_by)
    return table


def _host_table(plan: Plan) -> Table:
    """Return a table of host memory: the bytes of each role on the ranks with the highest peak, and the bytes that
    each stage moves."""
    table = _table("the host, bytes of a rank", "", "resident", "moved")
    for role in plan.fullest_trainers.roles:
        table.add_row(role.role, _prefixed(role.host), "")
    for stage in plan.stages:
        table.add_row(stage.name, "", _prefixed(stage.host_bytes))
    return table


def _prefixed(number: float) -> str:
    """Return a number with an SI prefix. For example, 1.5e12 becomes `1.5 T`."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{_short(number / size)} {prefix}"
    return _short(number)


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
