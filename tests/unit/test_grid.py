"""Every rank has one place in its role's grid, and one group of each kind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megappo.config.grid import Grid


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    tp, pp, dp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(3))
    ep = draw(st.sampled_from([n for n in range(1, tp * dp + 1) if tp * dp % n == 0]))
    first = draw(st.integers(0, 9))
    return Grid(range(first, first + tp * pp * dp), tp, pp, ep)


def test_a_grid_by_hand() -> None:
    """Two replicas of two stages of two tensor ranks, and experts over four ranks."""
    grid = Grid((3, 4, 5, 6, 7, 8, 9, 10), tp=2, pp=2, ep=4)
    assert (grid.dp, grid.model_ranks, grid.expert_replicas, grid.replicas_in_step) == (2, 4, 1, True)
    assert grid.tensor_groups == [[3, 4], [5, 6], [7, 8], [9, 10]]
    assert grid.pipeline_groups == [[3, 5], [4, 6], [7, 9], [8, 10]]
    assert grid.data_groups == [[3, 7], [4, 8], [5, 9], [6, 10]]
    assert grid.expert_groups == [[3, 4, 7, 8], [5, 6, 9, 10]]
    assert [list(grid.replica_ranks(d)) for d in range(2)] == [[3, 4, 5, 6], [7, 8, 9, 10]]
    assert [grid.output_rank(d) for d in range(2)] == [5, 9]
    assert (grid.place(8), grid.place(2), grid.stage_of(6), grid.stage_of(11)) == ((1, 0, 1), None, 1, None)
    assert not Grid((0, 1, 2, 3), tp=4, pp=1, ep=2).replicas_in_step


@given(grids())
def test_groups_of_a_kind_share_out_the_ranks(grid: Grid) -> None:
    for groups in (grid.tensor_groups, grid.pipeline_groups, grid.data_groups, grid.expert_groups):
        assert sorted(rank for group in groups for rank in group) == list(grid.ranks)
    for rank in grid.ranks:
        place = grid.place(rank)
        assert place is not None and grid.rank(*place) == rank
        assert rank in grid.replica_ranks(place[0]) and rank in grid.stage_ranks(place[1])


@given(grids())
def test_experts_stand_in_the_order_of_their_groups(grid: Grid) -> None:
    for stage in range(grid.pp):
        groups = grid.expert_groups[stage * grid.expert_replicas : (stage + 1) * grid.expert_replicas]
        assert [grid.expert_owner(stage, e) for e in range(grid.ep)] == groups[0]
        for copy, group in enumerate(groups):
            for expert_rank, rank in enumerate(group):
                replica, _, tensor_rank = grid.place(rank) or (-1, -1, -1)
                assert grid.expert_place(replica, tensor_rank) == (copy, expert_rank)
