"""Which experts compute a token: those with the largest scores, or those that the engine chose when it sampled.

Engine and trainer round differently, and where two experts score alike the same token goes to others: its
log-probability jumps, and the update learns of a policy that did not sample (Ma et al. 2025, arXiv:2510.11370).
With the engine's choice replayed, routers still compute every score and gradient themselves; they are told which of the
scores count. The weights of a token's experts are made of those as they would be of the largest.

Megatron has a place for that at its routers, `router_replay`, and a class of its own (moe/router_replay.py) which keeps
what is to be replayed in lists that all roles of a process share and that a pipeline empties by turns. Here it belongs
to the microbatch: each layer is given the microbatch's segments, in forward and when it is computed again.

A second loss can have tokens spread evenly over experts, sample by sample, as DeepSeek-V3 defines it (arXiv:2412.19437,
eq. 17 to 20; Megatron's `seq_aux_loss`): what a sample adds depends on nothing that shares its microbatch, so that no
layout changes the result. It adds up over layers; Megatron's autograd function brings it into backward.

Shape legend: l tokens of a microbatch on this context rank, T of them on this tensor rank; L layers of this rank, E
experts, K of them for each token; S samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

FURTHER = 2
"""Numbers of a report behind those of the experts."""


@dataclass(frozen=True)
class Balance:
    """Of which tokens the load-balancing loss of a microbatch is made."""

    samples: int
    sample_l: Tensor
    """int64: the sample of each token."""
    weights_l: Tensor
    """float32: the loss' weight by the square of its sample's tokens; 0 for padding."""


@dataclass
class MicrobatchRouting:
    """What the routers of a rank are told of a microbatch, and what they say of it."""

    counted_l: Tensor
    """bool: tokens of samples; not padding, and not those of a filler."""
    given_LlK: Tensor | None = None
    """The experts of each token. Where K different ones are not given the router chooses."""
    balance: Balance | None = None
    """Where tokens shall be spread evenly over experts."""
    reports: dict[int, Tensor] = field(default_factory=dict)
    """By layer: see `RouterChoice`. A layer that is computed again says the same again."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """By layer: the load-balancing loss of this rank's tokens, its weight included."""


def routing_tensors(
    lengths: Sequence[int],
    padded: Sequence[int],
    places_l: Tensor,
    routings: Sequence[Tensor],
    *,
    counts: bool,
    balance: float = 0.0,
) -> dict[str, Tensor]:
    """What routers are told of a pack, on the host; `told_routers` makes it known to them.

    Args:
        lengths: tokens of each sample.
        padded: what each takes up in the pack, and behind them what fills it up.
        places_l: where the tokens of this rank stand in the pack.
        routings: (tokens - 1, L, K) of each sample, or nothing.
        counts: whether the samples count.
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
    """From what `routing_tensors` made of so many samples, on the device."""
    balance = Balance(samples, tensors["sample"], tensors["balance"]) if "balance" in tensors else None
    return MicrobatchRouting(tensors["counted"], tensors.get("given"), balance)


def _members(experts_TK: Tensor, n_experts: int) -> Tensor:
    """(T, E) bool: the experts that are among them."""
    members = torch.zeros(len(experts_TK), n_experts, dtype=torch.bool, device=experts_TK.device)
    return members.scatter_(1, experts_TK, True)


def _within_best_groups(scores_TE: Tensor, groups: int, chosen: int) -> Tensor:
    """(T, E) the scores of the experts in the best groups, -inf elsewhere. A group has the sum of its two largest
    (DeepSeek-AI 2024, arXiv:2412.19437, and transformers), where Megatron's takes K / `chosen` of them."""
    of_groups_TGe = scores_TE.unflatten(1, (groups, -1))
    best_TG = of_groups_TGe.topk(2, dim=-1).values.sum(-1).topk(chosen, dim=-1).indices
    others_TG = torch.ones_like(of_groups_TGe[..., 0], dtype=torch.bool).scatter_(1, best_TG, False)
    return of_groups_TGe.masked_fill(others_TG[..., None], -torch.inf).flatten(1)


class RouterChoice:
    """Stands at `router_replay` of a layer's router, which asks it for a choice.

    Reports (E + 2,) int64 of each microbatch: the tokens that went to each expert; those whose experts were given; and
    those of them whom the router would have sent to others.
    """

    def __init__(self, layer: Any, number: int, tensor_rank: int, sharing: dist.ProcessGroup | None = None) -> None:
        """`number`: of the layer among this rank's. `sharing`: ranks that share out the tokens of each sample."""
        self._number, self._tensor_rank, self._sharing = number, tensor_rank, sharing
        config = layer.mlp.router.config
        self._scores_are_shares = config.moe_router_pre_softmax
        self._scores_are_sigmoids = config.moe_router_score_function == "sigmoid"
        self._router = layer.mlp.router
        self._microbatch: MicrobatchRouting | None = None
        layer.mlp.router.router_replay = self
        layer.register_forward_pre_hook(self._begin, with_kwargs=True)
        if layer.mlp.moe_layer_recompute:
            # Megatron would compute the experts again while the router is at a later microbatch.
            layer.mlp.moe_layer_recompute, layer.mlp.forward = False, partial(self._recomputed, layer.mlp.forward)

    def _begin(self, _layer: Any, _args: Any, options: Mapping[str, Any]) -> None:
        self._microbatch = getattr(options.get("packed_seq_params"), "routing", None)

    def _recomputed(self, forward: Callable[..., Any], hidden: Tensor, **options: Any) -> Any:
        microbatch = self._microbatch

        def of_microbatch(hidden: Tensor) -> Any:
            self._microbatch = microbatch
            return forward(hidden, **options)

        return checkpoint(of_microbatch, False, hidden)

    def get_replay_topk(
        self, scores_TE: Tensor, chosen: int, groups: int | None, of_groups: int | None, largest: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """(T, K) scores that count, and (T, K) their experts; as Megatron's router calls it."""
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
            nearest_TK = given_TK.clamp(0, n_experts - 1)  # itself, of an expert
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
        """The weighted loss of this rank's tokens, times K: of a sample E sum_e n_e sum_t p_te / T^2, if n_e of its T
        tokens go to expert e, which has p_te of a token's softmax, or of its sigmoids together. That is K where both
        are even."""
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
    """(L, E + 2): the reports of all microbatches, of one layer with experts after another; None without any."""
    found = [
        torch.stack([microbatch.reports[number] for number in sorted(microbatch.reports)])
        for microbatch in microbatches
        if microbatch is not None and microbatch.reports
    ]
    return torch.stack(found).sum(0) if found else None


def summed_losses(microbatches: Iterable[MicrobatchRouting | None]) -> float:
    """The load-balancing loss of all microbatches and layers here, its weight included."""
    losses = [loss for microbatch in microbatches if microbatch is not None for loss in microbatch.losses.values()]
    return float(torch.stack(losses).sum()) if losses else 0.0
