"""Tables, verdict and bottleneck of a plan, read and compared with the plan."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import cache

import pytest
from rich.console import Group
from rich.table import Table

from megappo.config import ConfigError, load_config
from megappo.plan.hardware.machines import MACHINES
from megappo.plan.inputs import Models
from megappo.plan.planner import Plan, default_machine, make_plan, read_models
from megappo.plan.search import Proposal
from megappo.plan.tables import plan_view, search_view
from tests.support.places import ROOT
from tests.support.plan import arch

MIDDLE = ROOT / "tests/support/qwen3_8b_8gpu.yaml"
EMBEDDED = ("rollout.engine=transformers", "rollout.generate_batch_sequences=16")
APART = ("rollout.servers={placement: disaggregated, count: 3}", "actor.layout={tensor_parallel: 4, ranks: 8}",
         "critic.layout={tensor_parallel: 8, first_rank: 8}")  # fmt: skip
PREFIXES = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}


@cache
def plan(*overrides: str, gpus: int = 8, machine: str = "h200", small: bool = False) -> Plan:
    config = load_config(MIDDLE, overrides)
    models = Models(arch(), arch(), arch()) if small else read_models(config, ROOT / "configs" / "models").models
    return make_plan(config, models, MACHINES[machine], gpus)


def tables(result: Plan) -> list[tuple[Table, dict[str, list[str]]]]:
    """Return each table of a plan with its rows by name."""
    group = plan_view(result)
    assert isinstance(group, Group)
    shown = [table for table in group.renderables if isinstance(table, Table)]
    rows = [list(zip(*(column.cells for column in table.columns), strict=True)) for table in shown]
    return [
        (table, {str(row[0]): [str(c) for c in row[1:]] for row in of}) for table, of in zip(shown, rows, strict=True)
    ]


def reads(cell: str, number: float, size: float | None = None) -> bool:
    """Return whether a cell shows a number in units of `size` or with a prefix, with at least three digits."""
    if size is not None:
        return cell == "" if number == 0 else float(cell) * size == pytest.approx(number, rel=5.1e-3)
    value, _, prefix = cell.partition(" ")
    unit = PREFIXES[prefix]
    shifted = number / unit
    right_prefix = (shifted < 1000 or prefix == "P") and (shifted >= 1 or prefix == "")
    return right_prefix and float(value) * unit == pytest.approx(number, rel=5.1e-3)


def row_reads(cells: Sequence[str], numbers: Sequence[float], size: float) -> bool:
    return all(reads(cell, number, size) for cell, number in zip(cells, numbers, strict=True))


@pytest.mark.parametrize(("result", "unit", "title"), [
    (plan(), "GB", "qwen3_8b_8gpu_math on 8 x h200: GB on ranks 0-7, the highest peak"),
    (plan(*APART, gpus=16), "GB", "on 16 x h200 and 3 of servers: GB on ranks 0-7, the highest peak"),
    (plan(*EMBEDDED, "actor.layout={}", "critic.layout={}", gpus=1, small=True), "MB", "on 1 x h200: MB on rank 0,"),
])  # fmt: skip
def test_tables_show_the_plan(result: Plan, unit: str, title: str) -> None:
    (memory, rows), (stages, of_stages) = tables(result)
    size, ranks = {"GB": 1e9, "MB": 1e6}[unit], result.fullest_trainers
    assert title in str(memory.title)
    for role in ranks.roles:
        stays, adds = (role.weights, role.gradients, role.optimizer), max(role.update, role.forward)
        assert row_reads(rows[role.role], (*stays, role.activations, role.head, role.transient, adds), size)
    assert row_reads(rows["sync"], (0, 0, 0, 0, 0, 0, ranks.sync), size)
    engines = {name: cells for name, cells in rows.items() if name in ("server", "engine")}
    holder, name = (result.ranks[-1], "server") if result.server_gpus else (ranks, "engine")
    assert list(engines) == [name]
    engine = holder.engine
    assert row_reads(engines[name], (engine.weights, 0, 0, 0, 0, 0, engine.kv_cache + engine.workspace), size)
    assert set(rows) == {role.role for role in ranks.roles} | {"sync", name}
    match = re.fullmatch(r"a step of (\S+) s, (\S+) tokens/s; FLOP of all ranks, bytes of one", str(stages.title))
    assert match is not None
    assert [float(n) for n in match.groups()] == pytest.approx(
        [result.step_seconds, result.tokens_per_second], rel=5.1e-3
    )
    assert list(of_stages) == [stage.name for stage in result.stages]
    for stage in result.stages:
        *numbers, seconds, bound_by = of_stages[stage.name]
        peak = max(ranks.stages.get(stage.name, 0.0) for ranks in result.ranks)
        planned = (peak, stage.flops, stage.memory_bytes, stage.link_bytes)
        assert all(reads(cell, number) for cell, number in zip(numbers, planned, strict=True)), stage
        assert reads(seconds, stage.seconds, 1.0) and bound_by == stage.bound_by


def test_reward_model_has_a_row() -> None:
    result = plan()
    assert "reward" not in tables(result)[0][1]
    ranks = tuple(dataclasses.replace(r, reward=3e9) for r in result.ranks)
    shown = tables(dataclasses.replace(result, ranks=ranks))[0][1]
    assert row_reads(shown["reward"], (3e9, 0, 0, 0, 0, 0, 0), 1e9)


def test_table_of_a_search() -> None:
    proposals = [
        Proposal((), "h100", 8, 71.26e9, 12.34, {"actor": "TP 1", "critic": "TP 2"}),
        Proposal(("a=1", "b=2"), "h100", 8, 9e9, 120.0, {"actor": "TP 4"}),
    ]
    table = search_view(proposals, 8, "h100")
    assert isinstance(table, Table) and table.title == "layouts on 8 x h100, the fastest first"
    rows = [[str(cell) for cell in row] for row in zip(*(column.cells for column in table.columns), strict=True)]
    assert rows == [
        ["12.3", "71.3", "actor: TP 1\ncritic: TP 2\nno changes to the configuration"],
        ["120.0", "9.0", "actor: TP 4\na=1 b=2"],
    ]


@pytest.mark.parametrize("result", [plan(), plan(*APART, gpus=16),
                                   plan(*EMBEDDED, "actor.layout={}", "critic.layout={}", gpus=1, small=True),
                                   plan(*EMBEDDED, "actor.layout={}", "critic.layout={}", gpus=1, machine="h100")],
)  # fmt: skip
def test_verdict_and_bottleneck(result: Plan) -> None:
    match = re.fullmatch(
        r"(.*): (ranks? [\d-]+)( of the servers)? (needs?) (\S+) (.B) in (\w+), (\S+) GB are usable", result.verdict
    )
    assert match is not None, result.verdict
    fits, ranks, servers, needs, peak, unit, stage, usable = match.groups()
    assert fits == ("fits" if result.fits else "does not fit")
    assert result.fits == (result.fullest.peak <= result.usable_bytes)
    assert (ranks.startswith("ranks "), needs == "need") == (len(result.fullest.ranks) > 1,) * 2
    assert (servers is not None, stage) == (result.fullest.of_servers, result.fullest.peak_stage)
    sizes = {"GB": 1e9, "MB": 1e6}
    assert float(peak) * sizes[unit] == pytest.approx(result.fullest.peak, abs=0.0501 * sizes[unit])
    assert result.fullest.peak / sizes[unit] >= (1 if unit == "GB" else 0) and (
        unit == "GB" or result.fullest.peak < 1e9
    )
    assert float(usable) == pytest.approx(result.usable_bytes / 1e9, abs=0.0501)
    longest = max(result.stages, key=lambda s: s.seconds)
    match = re.fullmatch(
        r"(\w+) takes (\d+)% of the predicted (\S+) seconds of a step, bound by (.*)", result.bottleneck
    )
    assert match is not None and match[1] == longest.name
    assert float(match[2]) == pytest.approx(100 * longest.seconds / result.step_seconds, abs=0.501)
    assert float(match[3]) == pytest.approx(result.step_seconds, rel=5.1e-3)
    bounds = {"arithmetic": "compute", "memory bandwidth": "memory", "kernel launches": "launches"}
    assert {**bounds, "communication": "links"}[match[4]] == longest.bound_by


def test_tokens_of_a_second() -> None:
    """A step has 512 prompts of 1,024 tokens with responses of 3,072."""
    result = plan()
    assert result.tokens_per_second == pytest.approx(512 * 4096 / result.step_seconds)


def test_servers_without_room_are_reported() -> None:
    """Qwen3-8B has 16.4 GB of weights in bfloat16, and 0.6 GB of keys and values for 4,096 tokens. The sum is 17.0 GB.
    0.2 of 80 GB is 16.0 GB."""
    message = (
        "rollout.servers.memory_fraction 0.2 gives a server 16.0 GB of each device, but weights and the longest "
        "sequence take 17.0 GB; raise it, or rollout.servers.tensor_parallel 1"
    )
    with pytest.raises(ConfigError) as refused:
        plan("rollout.servers={memory_fraction: 0.2}", machine="h100")
    assert str(refused.value) == message
    assert plan("rollout.servers={max_total_tokens: 4096}").ranks
    sentence = "max_total_tokens 4095 is below the longest prompt and response, 4096 tokens"
    with pytest.raises(ConfigError, match=sentence):
        plan("rollout.servers={max_total_tokens: 4095}")


def test_default_machine_of_a_plan() -> None:
    machines = [default_machine(load_config(MIDDLE, [f"runtime.device={d}"])).name for d in ("cpu", "cuda", "auto")]
    assert machines == ["cpu", "h100", "h100"]


def test_host_memory_has_a_table() -> None:
    result = plan("actor.offload=true", "critic.optimizer.on_host=0.5")
    table, rows = tables(result)[2]
    roles, stages = result.fullest_trainers.roles, result.stages
    assert str(table.title) == "the host, bytes of a rank"
    assert list(rows) == [*(role.role for role in roles), *(stage.name for stage in stages)]
    assert all(reads(rows[role.role][0], role.host) and rows[role.role][1] == "" for role in roles)
    assert all(reads(rows[stage.name][1], stage.host_bytes) and rows[stage.name][0] == "" for stage in stages)
    assert {role.role for role in roles if role.host} == {"actor", "critic"}
    assert len(tables(plan())) == 2
