"""Ranks and stages of a role: one place and one group of each kind, and the layers of pipeline stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.enums import LayerType

from megappo.config import load_config
from megappo.config.grid import Grid
from megappo.config.pipeline import balanced_layers, chunk_layers
from megappo.families.flops import update_flops
from megappo.megatron.stages import StageLayers
from megappo.plan.costs import update_cost
from tests.support.places import ROOT
from tests.support.plan import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, arch, machine, role, work


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


MIDDLE = ROOT / "tests/support/qwen3_8b_8gpu.yaml"
HEADS_IN_LAYERS = (0.0, 0.4, 1.0, 1.5, 2.0, 5.3)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write `total` as a sum of `parts` positive numbers."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def loads(counts: tuple[int, ...], stages: int, head: float) -> list[list[float]]:
    """Return the work of each chunk of each stage."""
    of_chunks = [*counts[:-1], counts[-1] + head]
    return [of_chunks[stage::stages] for stage in range(stages)]


@pytest.mark.parametrize("head", HEADS_IN_LAYERS)
@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3)])
def test_balanced_layers_are_optimal(stages: int, chunks: int, head: float) -> None:
    """The stage with the most work is minimal. Among alternatives with equal work on each stage, the largest chunk of
    each stage is minimal."""
    for layers in range(stages * chunks, 10):
        chosen = balanced_layers(layers, stages, chunks, head_in_layers=head)
        of_stages = loads(chosen, stages, head)
        every = [loads(counts, stages, head) for counts in compositions(layers, stages * chunks)]
        assert sum(chosen) == layers and min(chosen) > 0
        most = max(map(sum, of_stages))
        assert most == pytest.approx(min(max(map(sum, other)) for other in every))
        same = [other for other in every if [*map(sum, other)] == pytest.approx([*map(sum, of_stages)])]
        for stage, work_of_chunks in enumerate(of_stages):
            assert max(work_of_chunks) == pytest.approx(min(max(other[stage]) for other in same))


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "head", "counts"),
    [
        (4, 3, 1, 0.0, (1, 1, 2)),  # the last stage has the fewest microbatches
        (4, 3, 1, 0.1, (1, 2, 1)),
        (5, 3, 1, 0.1, (2, 2, 1)),
        (8, 4, 1, 1.0, (2, 2, 2, 2)),
        (8, 4, 1, 1.5, (2, 2, 3, 1)),
        (5, 2, 2, 0.5, (1, 1, 2, 1)),
        (4, 2, 1, 9.0, (3, 1)),  # no stage is empty
    ],
)
def test_balanced_layers_by_hand(layers: int, stages: int, chunks: int, head: float, counts: tuple[int, ...]) -> None:
    assert balanced_layers(layers, stages, chunks, head_in_layers=head) == counts


def test_flops_of_an_update_by_hand() -> None:
    """Attention has four FLOPs per channel of the queries and per token of 30 in the forward pass. An update has three
    times the FLOPs of the forward pass, plus the recomputation. The head of a language model is computed four times."""
    mlp = 2 * 3 * HIDDEN * FFN
    kernel = 4 * HEADS * HEAD_DIM * 30
    matrices = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * FFN
    norms = 2 * HIDDEN + 2 * HEAD_DIM + HIDDEN / LAYERS  # the final norm is divided among the layers
    forward = 2 * (matrices + norms) + kernel
    for recompute, again in (("none", 0), ("selective", kernel + mlp), ("full", forward)):
        layer, head = update_flops(
            arch(), 30, is_critic=False, recompute=recompute, recompute_modules=("core_attn", "mlp")
        )
        assert (layer, head) == (pytest.approx(3 * forward + again), 4 * 2 * VOCAB * HIDDEN)
    assert update_flops(arch(), 30, is_critic=True)[1] == 3 * 2 * HIDDEN


def test_settings_choose_the_layers() -> None:
    """`auto` keeps stages even if possible. The work of the head of a policy is proportional to the share of response
    tokens."""

    def chosen(name: str, layout: str, *more: str, layers: int = 28) -> tuple[int, ...] | None:
        config = load_config(MIDDLE, [f"{name}.layout={{{layout}}}", *more])
        return chunk_layers(
            config, name, config.trained[name], arch(layers=layers, vocab_size=40 * VOCAB, hidden_size=370)
        )

    for even in ("pipeline_parallel: 1", "pipeline_parallel: 4", "pipeline_parallel: 2, virtual_pipeline_chunks: 7"):
        assert chosen("actor", even) is None
    assert chosen("actor", "pipeline_parallel: 1, pipeline_layers: balanced") is None
    assert chosen("actor", "pipeline_parallel: 2, pipeline_layers: [20, 8]") == (20, 8)
    balanced = "pipeline_parallel: 4, pipeline_layers: balanced"
    assert chosen("actor", balanced) == (7, 8, 8, 5)
    assert chosen("critic", balanced) == chosen("actor", balanced, "rollout.max_response_tokens=64") == (7, 7, 7, 7)
    assert chosen("actor", balanced, layers=29) == chosen("actor", "pipeline_parallel: 4", layers=29)


def test_balanced_pipeline_is_faster_in_the_plan() -> None:
    """Arithmetic limits the speed. With even stages, the last stage is the slowest, because it also computes logits."""
    model = arch(vocab_size=9 * VOCAB)
    even, better = (role(model, tp=1, dp=1, chunk_layers=layers) for layers in (None, (4, 2)))
    layer, head = update_flops(model, 30, is_critic=False)
    slower, faster = (update_cost(r, work(), machine(bfloat16_flops=1e6)) for r in (even, better))
    assert slower.flops == faster.flops
    share = 19 / 30
    assert slower.seconds / faster.seconds == pytest.approx(
        (3 * layer + share * head) / max(4 * layer, 2 * layer + share * head)
    )


def test_megatron_gets_every_layer_once() -> None:
    """Chunks are in the order of the forward pass. Every stage computes the same offsets."""
    counts, stages = (2, 1, 1, 3, 1, 2), 3
    layouts = [StageLayers(counts, stages, stage) for stage in range(stages)]
    places = [(stage, chunk) for chunk in range(2) for stage in range(stages)]
    offsets = [layouts[stage].get_layer_offset(vp_stage=chunk) for stage, chunk in places]
    assert offsets == [0, 2, 3, 4, 7, 8]
    assert [layouts[stage].get_num_layers_to_build(vp_stage=chunk) for stage, chunk in places] == list(counts)
    assert [layouts[0].get_layer_offset(vp_stage=chunk, pp_rank=stage) for stage, chunk in places] == offsets
    layouts[0].validate_layer_layout(sum(counts), None)
    assert layouts[0].get_num_layers_to_build(LayerType.embedding) == 1
    assert layouts[2].get_num_layers_to_build(LayerType.loss, vp_stage=1) == 1
