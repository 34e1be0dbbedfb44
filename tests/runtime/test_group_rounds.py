"""Process groups in worlds of any size, as torch's fake backend plays them: few calls, the same on all members."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.config.grid import Grid
from megappo.config.schema import RuntimeSettings
from megappo.megatron.layout import Cut, Layout, Outside, make_layouts
from megappo.runtime.groups import WantedGroups, collective_backend, make_groups, make_host_group
from megappo.runtime.interrupts import Interrupts
from megappo.runtime.process import Runtime
from tests.support.fake_world import TIMEOUT, Call, fake_world

MOST_CALLS = 30
WORLD = 9
SECONDS = RuntimeSettings().collective_timeout_seconds


def calls_of_a_run(rank: int, world: int, cuts: dict[str, Cut]) -> tuple[dict[str, Layout | Outside], list[Call]]:
    """What a rank makes from its start to its first checkpoint; the reference stands on the actor's groups."""
    with fake_world(rank, world) as calls:
        layouts = make_layouts(cuts, "cuda", SECONDS)
        make_host_group("checkpoint", TIMEOUT)
    return layouts, calls


def check_order(sequences: dict[int, list[Call]]) -> None:
    """torch names a group after its ranks and how many its maker made before: each is the same one on all members."""
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
def test_a_rank_makes_few_groups(world: int, made: int) -> None:
    """For actor, critic, reference and checkpoints, the world's own included; each with the timeout of the settings."""
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
def test_all_ranks_make_the_same_groups_in_the_same_order(roles: list[Cut]) -> None:
    """Whatever the roles' ranks, one outside of all of them included."""
    named = {str(number): cut for number, cut in enumerate(roles)}
    runs = {rank: calls_of_a_run(rank, WORLD, named) for rank in range(WORLD)}
    check_order({rank: calls for rank, (_, calls) in runs.items()})
    for name, cut in named.items():
        there = [rank for rank, (layouts, _) in runs.items() if isinstance(layouts[name], Layout)]
        assert there == list(cut.grid.ranks)


def test_groups_of_the_same_ranks_are_one() -> None:
    """Between roles and within one, the world's own included; experts' groups are apart, one role's and another's
    together."""
    cut = Cut(Grid(range(4), 2, 2, 2))
    layouts, calls = calls_of_a_run(1, 8, {"actor": cut, "critic": cut})
    actor, critic = layouts["actor"], layouts["critic"]
    assert isinstance(actor, Layout) and isinstance(critic, Layout)
    assert vars(actor.groups) == vars(critic.groups)
    assert actor.groups.mp is actor.role_group  # one replica
    assert actor.groups.tp is actor.groups.tp_dp_cp is not actor.groups.ep
    assert actor.groups.pp is actor.groups.embd
    ranks = [call["ranks"] for call in calls if len(call["ranks"]) > 1]
    assert sorted(ranks) == sorted([tuple(range(8))] * 2 + [(0, 1, 2, 3), (0, 1)] * 2 + [(1, 3)])
    alone, calls = calls_of_a_run(0, 1, {"actor": Cut(Grid((0,), 1, 1))})
    assert isinstance(alone["actor"], Layout) and len(calls) == 3  # the world, the experts', the checkpoints'


def test_objects_never_wait_in_nccl() -> None:
    """On GPUs the world and the groups of roles carry Python objects over gloo; the others need none."""
    cuts = {"actor": Cut(Grid(range(4), 2, 1)), "critic": Cut(Grid(range(4, 8), 1, 4))}
    _, calls = calls_of_a_run(0, 8, cuts)
    backends = {call.get("group_desc", "world"): call["backend"] for call in calls}
    assert {name for name, backend in backends.items() if backend != "nccl"} == {"world", "actor", "checkpoint"}
    assert backends["world"] == backends["actor"] == "cpu:gloo,cuda:nccl" and backends["checkpoint"] == "gloo"
    assert collective_backend("cpu") == collective_backend("cpu", carries_objects=True) == "gloo"
    assert Runtime(0, 1, 0, torch.device("cuda")).backend == "nccl"


def test_asking_each_other_to_stop_raises_nothing_without_a_gpu() -> None:
    """A rank whose responses are there asks while servers still generate, also on its GPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        Interrupts(Runtime(0, 1, 0, torch.device("cuda"))).check()
    finally:
        dist.destroy_process_group()


def test_a_group_is_shared_only_with_what_may_share_it() -> None:
    kinds = [WantedGroups("a", [[0, 1]]), WantedGroups("b", [[1, 0]]), WantedGroups("c", [[0, 1]], apart="c")]
    with fake_world(0, 3):
        a, b, c = make_groups(kinds, "cpu", TIMEOUT)
        assert a is b is not c
    with fake_world(2, 3):
        assert make_groups(kinds, "cpu", TIMEOUT) == [None, None, None]
