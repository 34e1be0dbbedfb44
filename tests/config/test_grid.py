"""Every rank has one place in the grid of its role, and one group of each kind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megappo.config.grid import Grid


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    tp, pp, dp, cp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(4))
    stage = tp * cp * dp
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    first = draw(st.integers(0, 9))
    return Grid(range(first, first + stage * pp), tp, pp, ep, cp)


def test_grid_by_hand() -> None:
    """The grid has two replicas of two stages of two tensor ranks, and experts on four ranks."""
    grid = Grid((3, 4, 5, 6, 7, 8, 9, 10), tp=2, pp=2, ep=4)
    assert (grid.dp, grid.model_ranks, grid.expert_replicas, grid.replicas_in_step) == (2, 4, 1, True)
    assert grid.tensor_groups == [[3, 4], [5, 6], [7, 8], [9, 10]]
    assert grid.pipeline_groups == [[3, 5], [4, 6], [7, 9], [8, 10]]
    assert grid.data_groups == [[3, 7], [4, 8], [5, 9], [6, 10]]
    assert grid.expert_groups == [[3, 4, 7, 8], [5, 6, 9, 10]]
    assert [list(grid.replica_ranks(d)) for d in range(2)] == [[3, 4, 5, 6], [7, 8, 9, 10]]
    assert [grid.output_rank(d) for d in range(2)] == [5, 9]
    assert (grid.place(8), grid.place(2), grid.stage_of(6), grid.stage_of(11)) == ((1, 0, 0, 1), None, 1, None)
    assert not Grid((0, 1, 2, 3), tp=4, pp=1, ep=2).replicas_in_step


def test_grid_with_context_ranks_by_hand() -> None:
    """The grid has one replica of two stages. Two pairs of tensor ranks share the tokens of a stage, and all four ranks
    share the experts."""
    grid = Grid(range(8), tp=2, pp=2, ep=4, cp=2)
    assert (grid.dp, grid.copies, grid.model_ranks, grid.expert_replicas, grid.replicas_in_step) == (1, 2, 8, 1, False)
    assert grid.tensor_groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.context_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.tensor_context_groups == grid.expert_groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert grid.pipeline_groups == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.model_groups == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert grid.data_groups == grid.context_groups  # one replica
    assert (grid.output_rank(0), grid.place(7), grid.expert_owner(1, 3)) == (4, (0, 1, 1, 1), 7)
    assert [grid.first_copy(0, c) for c in range(2)] == [(0, 0), (0, 1)]  # the context ranks have different experts
    two = Grid(range(8), tp=2, pp=1, ep=2, cp=2)
    assert two.first_copy(1, 1) == (0, 0) and two.data_groups == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert Grid(range(8), tp=2, pp=1, ep=8, cp=2).first_copy(1, 1) == (1, 1)


@given(grids())
def test_groups_of_a_kind_cover_all_ranks(grid: Grid) -> None:
    shared = (grid.tensor_groups, grid.context_groups, grid.tensor_context_groups, grid.pipeline_groups)
    for groups in (*shared, grid.model_groups, grid.data_groups, grid.expert_groups):
        assert sorted(rank for group in groups for rank in group) == list(grid.ranks)
    for rank in grid.ranks:
        place = grid.place(rank)
        assert place is not None
        replica, stage, context_rank, tensor_rank = place
        assert grid.rank(replica, stage, tensor_rank, context_rank) == rank
        assert rank in grid.replica_ranks(place[0]) and rank in grid.stage_ranks(place[1])


@given(grids())
def test_experts_are_in_the_order_of_their_groups(grid: Grid) -> None:
    for stage in range(grid.pp):
        groups = grid.expert_groups[stage * grid.expert_replicas : (stage + 1) * grid.expert_replicas]
        assert [grid.expert_owner(stage, e) for e in range(grid.ep)] == groups[0]
        for copy, group in enumerate(groups):
            for expert_rank, rank in enumerate(group):
                replica, _, context_rank, tensor_rank = grid.place(rank) or (-1, -1, -1, -1)
                assert grid.expert_place(replica, context_rank, tensor_rank) == (copy, expert_rank)
                first = grid.first_copy(replica, context_rank)
                assert grid.expert_place(*first, tensor_rank)[1] == expert_rank
