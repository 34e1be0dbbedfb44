"""Process groups in worlds of any size, with the fake backend of torch: few calls, the same on all members."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.config.grid import Grid
from megappo.config.schema import RuntimeSettings
from megappo.megatron.layout import Cut, Layout, Outside, make_layouts
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.groups import WantedGroups, collective_backend, make_groups, make_host_group
from megappo.runtime.watch.interrupts import Interrupts
from tests.support.fake_world import TIMEOUT, Call, fake_world

MOST_CALLS = 30
WORLD = 9
SECONDS = RuntimeSettings().collective_timeout_seconds


def calls_of_a_run(rank: int, world: int, cuts: dict[str, Cut]) -> tuple[dict[str, Layout | Outside], list[Call]]:
    """Return the layouts and group calls of a rank until its first checkpoint. The reference uses the actor's
    groups."""
    with fake_world(rank, world) as calls:
        layouts = make_layouts(cuts, "cuda", SECONDS)
        make_host_group("checkpoint", TIMEOUT)
    return layouts, calls


def check_order(sequences: dict[int, list[Call]]) -> None:
    """All members must create a group with the same number, because torch derives the name from ranks and number."""
    assert len({len(calls) for calls in sequences.values()}) == 1
    for rank, calls in sequences.items():
        for number, call in enumerate(calls):
            for other in sequences.keys() & set(call["ranks"]):
                assert sequences[other][number] == call, (rank, other, number)


CUTS = {
    8: {"actor": Cut(Grid(range(8), 2, 2, 4)), "critic": Cut(Grid(range(8), 1, 4, 2))},
    128: {"actor": Cut(Grid(range(96), 4, 2, 8)), "critic": Cut(Grid(range(32, 128), 2, 4, 4))},
    1024: {"actor": Cut(Grid(range(1024), 8, 4, 16, 4)), "critic": Cut(Grid(range(1024), 4, 8, 32, 2))},
}


@pytest.mark.parametrize(("world", "made"), [(8, 13), (128, 20), (1024, 24)])
def test_rank_creates_few_groups(world: int, made: int) -> None:
    """The groups are for actor, critic, reference, checkpoints and the world, with the timeout in the settings."""
    sequences = {}
    for rank in sorted({*range(0, world, max(1, world // 8)), 1, world // 3, world - 1}):
        _, sequences[rank] = calls_of_a_run(rank, world, CUTS[world])
        assert len(sequences[rank]) == made <= MOST_CALLS
        assert {call["timeout"] for call in sequences[rank]} == {TIMEOUT}
    check_order(sequences)


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    tp, pp, dp, cp = draw(st.permutations([1, *draw(st.lists(st.sampled_from([1, 2]), min_size=3, max_size=3))]))
    stage = tp * cp * dp
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    ranks = draw(st.permutations(range(WORLD - 1)))[: stage * pp]
    return Cut(Grid(sorted(ranks), tp, pp, ep, cp))


@settings(max_examples=10)
@given(st.lists(cuts(), min_size=2, max_size=2))
def test_all_ranks_create_groups_in_the_same_order(roles: list[Cut]) -> None:
    """This holds for any ranks of the roles, including a rank without a role."""
    named = {str(number): cut for number, cut in enumerate(roles)}
    runs = {rank: calls_of_a_run(rank, WORLD, named) for rank in range(WORLD)}
    check_order({rank: calls for rank, (_, calls) in runs.items()})
    for name, cut in named.items():
        members = [rank for rank, (layouts, _) in runs.items() if isinstance(layouts[name], Layout)]
        assert members == list(cut.grid.ranks)


def test_groups_with_equal_ranks_are_shared() -> None:
    """Groups are shared within and between roles, including the world group. Groups of experts are separate, but
    shared between roles."""
    cut = Cut(Grid(range(4), 2, 2, 2))
    layouts, calls = calls_of_a_run(1, 8, {"actor": cut, "critic": cut})
    actor, critic = layouts["actor"], layouts["critic"]
    assert isinstance(actor, Layout) and isinstance(critic, Layout)
    assert vars(actor.groups) == vars(critic.groups)
    assert actor.groups.mp is actor.role_group  # there is one replica
    assert actor.groups.tp is actor.groups.tp_dp_cp is not actor.groups.ep
    assert actor.groups.pp is actor.groups.embd
    ranks = [call["ranks"] for call in calls if len(call["ranks"]) > 1]
    assert sorted(ranks) == sorted([tuple(range(8))] * 2 + [(0, 1, 2, 3), (0, 1)] * 2 + [(1, 3)])
    alone, calls = calls_of_a_run(0, 1, {"actor": Cut(Grid((0,), 1, 1))})
    assert (
        isinstance(alone["actor"], Layout) and len(calls) == 3
    )  # groups of the world, the experts and the checkpoints


def test_objects_are_transferred_with_gloo() -> None:
    """On GPUs, the world and the groups of roles transfer Python objects with gloo. Other groups transfer no
    objects."""
    cuts = {"actor": Cut(Grid(range(4), 2, 1)), "critic": Cut(Grid(range(4, 8), 1, 4))}
    _, calls = calls_of_a_run(0, 8, cuts)
    backends = {call.get("group_desc", "world"): call["backend"] for call in calls}
    assert {name for name, backend in backends.items() if backend != "nccl"} == {"world", "actor", "checkpoint"}
    assert backends["world"] == backends["actor"] == "cpu:gloo,cuda:nccl" and backends["checkpoint"] == "gloo"
    assert collective_backend("cpu") == collective_backend("cpu", carries_objects=True) == "gloo"
    assert Runtime(0, 1, 0, torch.device("cuda")).backend == "nccl"


def test_check_for_stop_needs_no_gpu() -> None:
    """A rank with all responses checks for a stop while servers still generate, also on the same GPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        Interrupts(Runtime(0, 1, 0, torch.device("cuda"))).check()
    finally:
        dist.destroy_process_group()


def test_separate_groups_are_not_shared() -> None:
    kinds = [WantedGroups("a", [[0, 1]]), WantedGroups("b", [[1, 0]]), WantedGroups("c", [[0, 1]], apart="c")]
    with fake_world(0, 3):
        a, b, c = make_groups(kinds, "cpu", TIMEOUT)
        assert a is b is not c
    with fake_world(2, 3):
        assert make_groups(kinds, "cpu", TIMEOUT) == [None, None, None]
