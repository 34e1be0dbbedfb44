"""Replayed experts of a router and the reports of the router, on stand-in layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megappo.config.pipeline import stage_layers
from megappo.megatron.context import ContextShard
from megappo.megatron.layers.router import (
    MicrobatchRouting,
    RouterChoice,
    microbatch_routing,
    routing_tensors,
    summed_losses,
    summed_reports,
)
from megappo.megatron.schedule import PlacedSample, pack_samples
from megappo.types import RoutingShape

E, K = 6, 2
NONE = RoutingShape(1, K, E).unknown(1)[0, 0].tolist()


class Layer(nn.Module):
    """A layer that requests a choice of experts like Megatron's router."""

    def __init__(self, softmax_first: bool = False, biases: Tensor | None = None) -> None:
        """Create the layer. With `biases` the scores are sigmoids."""
        super().__init__()
        function = "softmax" if biases is None else "sigmoid"
        config = SimpleNamespace(moe_router_pre_softmax=softmax_first, moe_router_score_function=function)
        router = SimpleNamespace(router_replay=None, config=config, correction_bias=biases)
        self.mlp: Any = SimpleNamespace(router=router, moe_layer_recompute=False)

    def forward(self, scores_TE: Tensor, *, packed_seq_params: Any) -> tuple[Tensor, Tensor]:
        def largest(scores: Tensor, chosen: int, **_groups: Any) -> tuple[Tensor, Tensor]:
            result = scores.topk(chosen, dim=1)
            return result.values, result.indices

        choice = self.mlp.router.router_replay
        result: tuple[Tensor, Tensor] = choice.get_replay_topk(scores_TE, K, None, None, largest)
        return result


def route(
    scores_TE: Tensor, microbatch: MicrobatchRouting | None, tensor_rank: int = 0, *, softmax_first: bool = False,
    biases: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    layer = Layer(softmax_first, biases)
    RouterChoice(layer, 0, tensor_rank)
    result: tuple[Tensor, Tensor] = layer(scores_TE, packed_seq_params=SimpleNamespace(routing=microbatch))
    return result


def test_replayed_experts_override_the_router() -> None:
    """Gradients reach the scores of the chosen experts. Replayed entries without K different experts are ignored."""
    scores_TE = torch.tensor([[0.0, 1, 2, 3, 4, 5]]).repeat(6, 1).requires_grad_()
    replayed = torch.tensor([[0, 1], [4, 5], NONE, [3, 3], [5, 2], [0, 1]], dtype=torch.uint8)
    counted = torch.tensor([True, True, True, True, True, False])
    microbatch = MicrobatchRouting(counted, replayed[None])
    values_TK, experts_TK = route(scores_TE, microbatch)
    assert experts_TK.tolist() == [[0, 1], [4, 5], [5, 4], [5, 4], [5, 2], [0, 1]]
    assert torch.equal(values_TK, experts_TK.float())
    values_TK.sum().backward()
    assert scores_TE.grad is not None and scores_TE.grad.nonzero()[:4].tolist() == [[0, 0], [0, 1], [1, 4], [1, 5]]
    # Number of tokens of each expert, tokens with replayed experts, and replayed tokens with another router choice.
    assert microbatch.reports[0].tolist() == [1, 1, 1, 0, 3, 4, 3, 2]
    again = MicrobatchRouting(counted)
    assert route(scores_TE, again)[1].tolist() == [[5, 4]] * 6 and again.reports[0].tolist() == [0, 0, 0, 0, 5, 5, 0, 0]
    assert route(scores_TE, None)[1].tolist() == [[5, 4]] * 6
    total = summed_reports([microbatch, again, None])
    assert total is not None and total.tolist() == [[1, 1, 1, 0, 8, 9, 3, 2]] and summed_reports([None]) is None


def test_biases_affect_only_the_choice_of_experts() -> None:
    """The sigmoids and biases select experts 0 and 3. Replayed experts take precedence."""
    sigmoids = torch.tensor([[0.1, 0.5, 0.6, 0.4, 0.2, 0.3]]).repeat(2, 1).requires_grad_()
    biases = torch.tensor([1.0, 0.0, 0.0, 0.3, 0.0, 0.0])
    replayed = torch.tensor([NONE, [1, 2]], dtype=torch.uint8)
    microbatch = MicrobatchRouting(torch.ones(2, dtype=torch.bool), replayed[None])
    values_TK, experts_TK = route(sigmoids, microbatch, biases=biases)
    assert experts_TK.tolist() == [[0, 3], [1, 2]]
    torch.testing.assert_close(values_TK, torch.tensor([[0.1, 0.4], [0.5, 0.6]]))
    assert microbatch.reports[0].tolist() == [1, 1, 1, 1, 0, 0, 1, 1]
    assert route(sigmoids, None, biases=biases)[1].tolist() == [[0, 3]] * 2


@pytest.mark.parametrize(
    ("replayed", "softmax_first", "of_sigmoids"),
    [(True, False, False), (False, False, False), (True, True, False), (False, False, True)],
)
def test_load_balancing_loss_matches_its_formula(replayed: bool, softmax_first: bool, of_sigmoids: bool) -> None:
    """Samples of five and two tokens and one padding token are compared with the formula in float64. Families with
    expert weights that do not sum to 1 pass the softmax to the choice. Sigmoids are normalised to a sum of 1."""
    weight, lengths, g = 0.3, (5, 2), torch.Generator().manual_seed(1)
    scores_TE = torch.randn(8, E, generator=g, dtype=torch.float64).requires_grad_()
    routings = (
        [torch.rand(n - 1, 1, E, generator=g).topk(K).indices.to(torch.uint8) for n in lengths] if replayed else []
    )
    tensors = routing_tensors(lengths, [5, 2, 1], torch.arange(8), routings, counts=True, balance=weight)
    microbatch = microbatch_routing(tensors, 2)
    scored_TE = scores_TE.softmax(-1) if softmax_first else scores_TE.sigmoid() if of_sigmoids else scores_TE
    biases = torch.linspace(-1, 1, E) if of_sigmoids else None
    values_TK, experts_TK = route(scored_TE.float(), microbatch, softmax_first=softmax_first, biases=biases)
    (0 * values_TK).sum().backward()
    gradient, scores_TE.grad = scores_TE.grad, None
    loss = torch.zeros((), dtype=torch.float64)
    for start, length in ((0, 5), (5, 2)):
        taken, own = experts_TK[start : start + length], scores_TE[start : start + length].softmax(-1)
        if of_sigmoids:
            own = scores_TE[start : start + length].sigmoid()
            own = own / own.sum(-1, keepdim=True)
        loads = torch.stack([(taken == e).sum() for e in range(E)])
        loss = loss + weight * E / (K * length**2) * (loads * own.sum(0)).sum()
    loss.backward()
    torch.testing.assert_close(gradient, scores_TE.grad, rtol=1e-5, atol=1e-7)
    assert summed_losses([microbatch]) == pytest.approx(float(loss.detach()), rel=1e-5)
    with torch.no_grad():
        route(scores_TE.float(), again := microbatch_routing(tensors, 2))
    assert not again.losses and summed_losses([again, None]) == 0.0
    assert microbatch_routing(routing_tensors(lengths, [5, 2, 1], torch.arange(8), [], counts=True), 2).balance is None


def test_balanced_tokens_have_a_loss_of_one() -> None:
    tensors = routing_tensors([6], [6], torch.arange(6), [], counts=True, balance=1.0)
    microbatch = microbatch_routing(tensors, 1)
    scores = torch.zeros(6, E, requires_grad=True)
    route(
        scores + 1e-6 * torch.stack([torch.eye(E).roll(n, 0)[0] + torch.eye(E).roll(n, 0)[1] for n in range(E)]),
        microbatch,
    )
    assert summed_losses([microbatch]) == pytest.approx(1.0, abs=1e-5)


def test_tensor_rank_uses_routing_of_its_tokens() -> None:
    replayed = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4]], dtype=torch.uint8)[None]
    for rank in (0, 1):
        microbatch = MicrobatchRouting(torch.ones(4, dtype=torch.bool), replayed)
        experts = route(torch.zeros(2, E), microbatch, rank)[1]
        assert experts.tolist() == replayed[0, 2 * rank : 2 * rank + 2].tolist()


def test_recomputed_layer_uses_its_own_microbatch() -> None:
    """Megatron recomputes experts after the layer has started another microbatch."""
    layer = Layer()
    layer.mlp.moe_layer_recompute = True
    layer.mlp.forward = lambda hidden, **_options: (forwarded(layer, hidden), None)

    def forwarded(layer: Layer, hidden: Tensor) -> Tensor:
        values, _ = Layer.forward(layer, hidden, packed_seq_params=None)
        return values

    RouterChoice(layer, 0, 0)
    assert not layer.mlp.moe_layer_recompute
    counted = torch.ones(1, dtype=torch.bool)
    outputs, inputs = [], []
    for experts in ([0, 1], [2, 3]):
        routing = MicrobatchRouting(counted, torch.tensor([[experts]], dtype=torch.uint8))
        hidden = torch.arange(6.0)[None].requires_grad_()
        layer(hidden, packed_seq_params=SimpleNamespace(routing=routing))
        outputs.append(layer.mlp.forward(hidden)[0])
        inputs.append(hidden)
    for output in outputs:
        output.sum().backward()
    assert [x.grad.nonzero()[:, 1].tolist() for x in inputs if x.grad is not None] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("rank", [0, 1])
def test_routing_is_split_like_tokens(rank: int) -> None:
    """Padding, the last token of a sample and fillers have no routing. Context ranks have the routing of their
    tokens."""
    shard = ContextShard(2, rank)
    shape = RoutingShape(3, K, E)
    samples = []
    for number, length in enumerate((7, 5)):
        routing = torch.arange(length - 1)[:, None, None].expand(-1, 3, K) + 10 * number
        samples.append(PlacedSample(number, torch.arange(length) + 10 * number, 2, routing=routing.to(shape.dtype)))
    batch = pack_samples(samples, torch.device("cpu"), shard=shard, multiple_of=2, balance=0.0)
    routed, tokens = batch.segments.routing, batch.tokens_1l[0]
    assert routed is not None and routed.replayed_LlK is not None and routed.replayed_LlK.shape == (3, len(tokens), K)
    known = routed.replayed_LlK[0, :, 0] < 200
    assert torch.equal(routed.replayed_LlK[2, known, 1].long(), tokens[known])
    mine = set(tokens[routed.counted_l].tolist())
    assert mine - set(tokens[known].tolist()) == mine & {6, 14}
    filler = pack_samples(samples, torch.device("cpu"), shard=shard, is_filler=True, balance=0.0).segments.routing
    assert filler is not None and not filler.counted_l.any()
    assert pack_samples(samples, torch.device("cpu")).segments.routing is None


def test_routing_is_optional() -> None:
    tensors = routing_tensors([2], [2, 2], torch.arange(4), [], counts=True)
    assert tensors.keys() == {"counted"} and tensors["counted"].tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("chunks", "stages", "expected"),
    [((4,), 1, ((0, 1, 2, 3),)), ((3, 1), 2, ((0, 1, 2), (3,))), ((1, 2, 1, 1), 2, ((0, 3), (1, 2, 4)))],
)
def test_stage_has_the_layers_of_its_chunks(
    chunks: tuple[int, ...], stages: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert stage_layers(chunks, stages) == expected


@pytest.mark.parametrize(("experts", "dtype"), [(8, torch.uint8), (255, torch.uint8), (256, torch.int16)])
def test_routing_uses_the_smallest_integer_type(experts: int, dtype: torch.dtype) -> None:
    shape = RoutingShape(2, 3, experts)
    unknown = shape.unknown(4)
    assert unknown.dtype == dtype and unknown.shape == (4, 2, 3)
    assert (unknown.long() >= experts).all() and torch.tensor(experts - 1).to(dtype) == experts - 1
