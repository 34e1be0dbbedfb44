"""Chooses the experts of each token: those with the largest scores, or those that the engine used when it sampled.

Engine and trainer round differently. Where two experts score almost alike, the same token may go to different ones: its
log-probability jumps, and the update learns from a policy that did not sample (Ma et al. 2025, arXiv:2510.11370). With
the engine's choice replayed, routers still compute every score and gradient; only the choice of scores is given. The
weights of a token's experts are computed from these scores as they would be from the largest.

Megatron's routers have a field for this, `router_replay`, with a class of its own (moe/router_replay.py). That class
keeps recorded choices in lists that all roles of a process share and that a pipeline consumes in turn. Here they belong
to the microbatch: each layer gets them with the microbatch's segments, in forward and when it is recomputed.

A second loss can spread tokens evenly over experts within each sample, as in DeepSeek-V3 (arXiv:2412.19437, eq. 17 to
20; Megatron's `seq_aux_loss`). What a sample adds does not depend on other samples of its microbatch, so no layout
changes the result. The loss is summed over layers; Megatron's autograd function adds it to backward.

Shape legend: l tokens of a microbatch on this context rank, T of them on this tensor rank; L layers of this rank, E
experts, K of them for each token; S samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_layer import TransformerLayer

MLPOutput: TypeAlias = tuple[Tensor, Tensor | None]
"""Output of a layer's MLP or experts, and the bias that Megatron would add to it."""
FURTHER = 2
"""Counts in a report behind those of the experts: tokens with given experts, and tokens whose experts that changed."""


@dataclass(frozen=True)
class Balance:
    """Inputs of a microbatch's load-balancing loss."""

    samples: int
    sample_l: Tensor
    """int64: the sample that each token belongs to."""
    weights_l: Tensor
    """float32: weight of the loss, divided by the square of the number of the sample's tokens; 0 for padding."""


@dataclass
class MicrobatchRouting:
    """Inputs of a rank's routers for a microbatch, and their reports."""

    counted_l: Tensor
    """bool: tokens that count; false for padding and for the samples of a filler."""
    given_LlK: Tensor | None = None
    """Given experts of each token; a token without K different ones is routed by the router. None: routers choose
    all."""
    balance: Balance | None = None
    """Inputs of the load-balancing loss; None where there is none."""
    reports: dict[int, Tensor] = field(default_factory=dict)
    """Counts of `RouterChoice` by layer. A recomputed layer writes the same counts again."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Load-balancing loss of this rank's tokens by layer, its weight included."""


def routing_tensors(
    lengths: Sequence[int],
    padded: Sequence[int],
    places_l: Tensor,
    routings: Sequence[Tensor],
    *,
    counts: bool,
    balance: float = 0.0,
) -> dict[str, Tensor]:
    """Inputs of the routers for a pack, on the host; `told_routers` takes them on the device.

    Args:
        lengths: tokens of each sample.
        padded: tokens that each sample takes up in the pack, followed by those of the segment that fills it up.
        places_l: positions of this rank's tokens in the pack.
        routings: (tokens - 1, L, K) of each sample, or nothing.
        counts: whether the samples count; false for fillers.
        balance: weight of a sample in the load-balancing loss.
    """
    starts = [0, *itertools.accumulate(padded)]
    counted = torch.zeros(starts[-1], dtype=torch.bool)
    for start, length in zip(starts, lengths, strict=False):
        counted[start : start + length] = counts
    found = {"counted": counted[places_l]}
    if routings:
        nobody = torch.iinfo(routings[0].dtype).max
        given = torch.full((starts[-1], *routings[0].shape[1:]), nobody, dtype=routings[0].dtype)
        for start, routing in zip(starts, routings, strict=False):
            given[start : start + len(routing)] = routing
        found["given"] = given[places_l].transpose(0, 1).contiguous()
    if balance:
        sample, weights = torch.zeros(starts[-1], dtype=torch.int64), torch.zeros(starts[-1])
        for number, (start, length) in enumerate(zip(starts, lengths, strict=False)):
            sample[start : start + length] = number
            weights[start : start + length] = counts * balance / length**2
        found |= {"sample": sample[places_l], "balance": weights[places_l]}
    return found


def told_routers(tensors: Mapping[str, Tensor], samples: int) -> MicrobatchRouting:
    """Make the routing of a pack of so many samples from the tensors of `routing_tensors`, on the device."""
    balance = Balance(samples, tensors["sample"], tensors["balance"]) if "balance" in tensors else None
    return MicrobatchRouting(tensors["counted"], tensors.get("given"), balance)


def _members(experts_TK: Tensor, n_experts: int) -> Tensor:
    """(T, E) bool: which experts each token has."""
    members = torch.zeros(len(experts_TK), n_experts, dtype=torch.bool, device=experts_TK.device)
    return members.scatter_(1, experts_TK, True)


def _within_best_groups(scores_TE: Tensor, groups: int, chosen: int) -> Tensor:
    """(T, E): the scores of experts in the best groups, -inf elsewhere. A group is ranked by the sum of its two largest
    scores (DeepSeek-AI 2024, arXiv:2412.19437, and transformers); Megatron takes K / `chosen` of them."""
    of_groups_TGe = scores_TE.unflatten(1, (groups, -1))
    best_TG = of_groups_TGe.topk(2, dim=-1).values.sum(-1).topk(chosen, dim=-1).indices
    others_TG = torch.ones_like(of_groups_TGe[..., 0], dtype=torch.bool).scatter_(1, best_TG, False)
    return of_groups_TGe.masked_fill(others_TG[..., None], -torch.inf).flatten(1)


class RouterChoice:
    """Replaces `router_replay` of a layer's router, which calls it for a choice of experts.

    It counts (E + 2,) int64 of each microbatch: the tokens that went to each expert, the tokens with given experts, and
    those of them that the router would have sent elsewhere.
    """

    def __init__(
        self, layer: TransformerLayer, number: int, tensor_rank: int, sharing: dist.ProcessGroup | None = None
    ) -> None:
        """`number`: index of the layer among this rank's layers with experts. `sharing`: ranks that split the tokens of
        each sample."""
        self._number, self._tensor_rank, self._sharing = number, tensor_rank, sharing
        config = layer.mlp.router.config
        self._scores_are_shares = config.moe_router_pre_softmax
        self._scores_are_sigmoids = config.moe_router_score_function == "sigmoid"
        self._router = layer.mlp.router
        self._microbatch: MicrobatchRouting | None = None
        layer.mlp.router.router_replay = self
        layer.register_forward_pre_hook(self._begin, with_kwargs=True)
        if layer.mlp.moe_layer_recompute:
            # Megatron would recompute the experts in backward, when the router already holds a later microbatch.
            layer.mlp.moe_layer_recompute, layer.mlp.forward = False, partial(self._recomputed, layer.mlp.forward)

    def _begin(
        self,
        _layer: TransformerLayer,
        _args: tuple[Tensor, ...],
        options: Mapping[str, Tensor | PackedSeqParams | None],
    ) -> None:
        self._microbatch = getattr(options.get("packed_seq_params"), "routing", None)

    def _recomputed(self, forward: Callable[..., MLPOutput], hidden: Tensor, **options: Any) -> MLPOutput:
        microbatch = self._microbatch

        def of_microbatch(hidden: Tensor) -> MLPOutput:
            self._microbatch = microbatch
            return forward(hidden, **options)

        found: MLPOutput = checkpoint(of_microbatch, False, hidden)
        return found

    def get_replay_topk(
        self,
        scores_TE: Tensor,
        chosen: int,
        groups: int | None,
        of_groups: int | None,
        largest: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """(T, K) scores of the chosen experts, and (T, K) their indices; the signature is that of Megatron's router."""
        if self._scores_are_sigmoids:
            biased_TE = scores_TE + self._router.correction_bias
            if groups is not None and of_groups is not None:
                biased_TE = _within_best_groups(biased_TE, groups, of_groups)
            _, experts_TK = largest(biased_TE, chosen)
            values_TK = scores_TE.gather(1, experts_TK)
        else:
            values_TK, experts_TK = largest(scores_TE, chosen, num_groups=groups, group_topk=of_groups)
        microbatch = self._microbatch
        if microbatch is None:
            return values_TK, experts_TK
        n_tokens, n_experts = scores_TE.shape
        here = slice(self._tensor_rank * n_tokens, (self._tensor_rank + 1) * n_tokens)
        counted_T, members_TE = microbatch.counted_l[here], _members(experts_TK, n_experts)
        known_T = changed_T = torch.zeros_like(counted_T)
        if microbatch.given_LlK is not None:
            given_TK = microbatch.given_LlK[self._number, here].long()
            nearest_TK = given_TK.clamp(0, n_experts - 1)  # equal to the given index where that is an expert's
            given_TE = _members(nearest_TK, n_experts)
            known_T = (nearest_TK == given_TK).all(1) & (given_TE.sum(1) == chosen)
            changed_T = known_T & (given_TE & ~members_TE).any(1)
            experts_TK = torch.where(known_T[:, None], given_TK, experts_TK)
            members_TE = torch.where(known_T[:, None], given_TE, members_TE)
            values_TK = scores_TE.gather(1, experts_TK)
        further = torch.stack([known_T, changed_T], dim=1)
        counted = torch.cat([members_TE, further], dim=1) & counted_T[:, None]
        microbatch.reports[self._number] = counted.sum(0)
        if microbatch.balance is not None and torch.is_grad_enabled():
            loss = self._balancing_loss(scores_TE, members_TE, microbatch.balance, here) / chosen
            microbatch.losses[self._number] = loss.detach()
            values_TK = MoEAuxLossAutoScaler.apply(values_TK, loss)
        return values_TK, experts_TK

    def _balancing_loss(self, scores_TE: Tensor, members_TE: Tensor, balance: Balance, here: slice) -> Tensor:
        """Weighted load-balancing loss of this rank's tokens, times K.

        For a sample of T tokens it is E sum_e n_e sum_t p_te / T^2, where n_e tokens go to expert e and p_te is its
        share of a token's softmax, or of the token's sum of sigmoids. It equals K where both are uniform.
        """
        sample_T, weights_T = balance.sample_l[here], balance.weights_l[here]
        if self._scores_are_sigmoids:
            shares_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        else:
            shares_TE = scores_TE if self._scores_are_shares else scores_TE.float().softmax(-1)
        n_experts = members_TE.shape[1]
        of_samples = (members_TE & (weights_T > 0)[:, None]).float()
        loads_SE = of_samples.new_zeros(balance.samples, n_experts).index_add(0, sample_T, of_samples)
        if self._sharing is not None:
            dist.all_reduce(loads_SE, group=self._sharing)
        return (n_experts * weights_T[:, None] * loads_SE.index_select(0, sample_T) * shares_TE).sum()


def summed_reports(microbatches: Iterable[MicrobatchRouting | None]) -> Tensor | None:
    """(L, E + 2): the counts of all microbatches, one row for each layer with experts; None without any."""
    found = [
        torch.stack([microbatch.reports[number] for number in sorted(microbatch.reports)])
        for microbatch in microbatches
        if microbatch is not None and microbatch.reports
    ]
    return torch.stack(found).sum(0) if found else None


def summed_losses(microbatches: Iterable[MicrobatchRouting | None]) -> float:
    """Load-balancing loss summed over microbatches and this rank's layers, its weight included."""
    losses = [loss for microbatch in microbatches if microbatch is not None for loss in microbatch.losses.values()]
    return float(torch.stack(losses).sum()) if losses else 0.0
