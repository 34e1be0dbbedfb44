"""Choice of the experts of each token: the experts with the largest scores, or the experts that the engine used for
sampling.

Engine and trainer round differently. If two experts have nearly equal scores, engine and trainer may choose different
experts for the same token. The log-probability of the token then differs strongly, and the update learns from a policy
that did not sample (Ma et al. 2025, arXiv:2510.11370). With replayed choices, routers still compute all scores and
gradients. Only the choice of experts is fixed. The weights of a token's experts are computed from their scores as
usual.

Routers of Megatron have a field for this purpose, `router_replay`, with a separate class (moe/router_replay.py). That
class keeps recorded choices in lists. All roles of a process share these lists, and a pipeline consumes the lists in
turn. Here, the choices belong to the microbatch. Each layer gets them with the segments of the microbatch, in the
forward pass and during recomputation.

An additional loss can balance the tokens over experts within each sample, as in DeepSeek-V3 (arXiv:2412.19437, eq. 17
to 20; `seq_aux_loss` of Megatron). The loss of a sample does not depend on other samples of its microbatch, so the
result is the same for all layouts. The loss is summed over layers. An autograd function of Megatron adds the loss to
the backward pass.

Shape legend: l tokens of a microbatch on this context rank, T tokens of the microbatch on this tensor rank; L layers
of this rank, E experts, K experts of each token; S samples.
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
"""Output of a layer's MLP or experts, with the bias that Megatron would add to the output."""
EXTRA_COUNTS = 2
"""Number of counts in a report after the counts of the experts: tokens with replayed experts, and tokens with changed
experts."""


@dataclass(frozen=True)
class Balance:
    """Inputs of the load-balancing loss of a microbatch."""

    samples: int
    sample_l: Tensor
    """Sample of each token (int64)."""
    weights_l: Tensor
    """Weight of the loss, divided by the square of the number of the sample's tokens (float32); 0 for padding."""


@dataclass
class MicrobatchRouting:
    """Inputs of the routers of a rank for a microbatch, and the reports of the routers."""

    counted_l: Tensor
    """Tokens that count in the reports (bool); false for padding and for the samples of a filler."""
    replayed_LlK: Tensor | None = None
    """Replayed experts of each token. The router chooses the experts of a token without K different replayed experts.
    With None, routers choose all experts."""
    balance: Balance | None = None
    """Inputs of the load-balancing loss; None without this loss."""
    reports: dict[int, Tensor] = field(default_factory=dict)
    """Counts of `RouterChoice` by layer. A recomputed layer writes the same counts again."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Weighted load-balancing loss of this rank's tokens by layer."""


def routing_tensors(
    lengths: Sequence[int],
    padded: Sequence[int],
    places_l: Tensor,
    routings: Sequence[Tensor],
    *,
    counts: bool,
    balance: float = 0.0,
) -> dict[str, Tensor]:
    """Return the inputs of the routers for a pack in host memory. `microbatch_routing` reads them on the device.

    Args:
        lengths: tokens of each sample.
        padded: tokens of each sample in the pack including padding, followed by the tokens of the filling segment.
        places_l: positions of this rank's tokens in the pack.
        routings: (tokens - 1, L, K) of each sample, or an empty sequence.
        counts: whether the samples count; false for fillers.
        balance: weight of a sample in the load-balancing loss.
    """
    starts = [0, *itertools.accumulate(padded)]
    counted = torch.zeros(starts[-1], dtype=torch.bool)
    for start, length in zip(starts, lengths, strict=False):
        counted[start : start + length] = counts
    tensors = {"counted": counted[places_l]}
    if routings:
        no_expert = torch.iinfo(routings[0].dtype).max
        expert_choices = torch.full((starts[-1], *routings[0].shape[1:]), no_expert, dtype=routings[0].dtype)
        for start, routing in zip(starts, routings, strict=False):
            expert_choices[start : start + len(routing)] = routing
        tensors["given"] = expert_choices[places_l].transpose(0, 1).contiguous()
    if balance:
        sample, weights = torch.zeros(starts[-1], dtype=torch.int64), torch.zeros(starts[-1])
        for number, (start, length) in enumerate(zip(starts, lengths, strict=False)):
            sample[start : start + length] = number
            weights[start : start + length] = counts * balance / length**2
        tensors |= {"sample": sample[places_l], "balance": weights[places_l]}
    return tensors


def microbatch_routing(tensors: Mapping[str, Tensor], samples: int) -> MicrobatchRouting:
    """Return the routing of a pack of `samples` samples from the tensors of `routing_tensors` on the device."""
    balance = Balance(samples, tensors["sample"], tensors["balance"]) if "balance" in tensors else None
    return MicrobatchRouting(tensors["counted"], tensors.get("given"), balance)


def _members(experts_TK: Tensor, n_experts: int) -> Tensor:
    """Return (T, E) bool: true for the experts of each token."""
    members = torch.zeros(len(experts_TK), n_experts, dtype=torch.bool, device=experts_TK.device)
    return members.scatter_(1, experts_TK, True)


def _within_best_groups(scores_TE: Tensor, groups: int, chosen: int) -> Tensor:
    """Return (T, E): the scores of experts in the best groups, and -inf for other experts. The rank of a group is the
    sum of its two largest scores (DeepSeek-AI 2024, arXiv:2412.19437, and transformers). Megatron uses the K /
    `chosen` largest scores of a group."""
    of_groups_TGe = scores_TE.unflatten(1, (groups, -1))
    best_TG = of_groups_TGe.topk(2, dim=-1).values.sum(-1).topk(chosen, dim=-1).indices
    others_TG = torch.ones_like(of_groups_TGe[..., 0], dtype=torch.bool).scatter_(1, best_TG, False)
    return of_groups_TGe.masked_fill(others_TG[..., None], -torch.inf).flatten(1)


class RouterChoice:
    """Replacement for `router_replay` of a layer's router, which calls this class for a choice of experts.

    The class counts (E + 2,) int64 of each microbatch: the tokens of each expert, the tokens with replayed experts,
    and the replayed tokens for which the router would choose other experts.
    """

    def __init__(
        self, layer: TransformerLayer, number: int, tensor_rank: int, sharing: dist.ProcessGroup | None = None
    ) -> None:
        """Attach to the router of a layer. `number` is the index of the layer among this rank's layers with experts.
        `sharing` is the group of ranks that split the tokens of each sample."""
        self._number, self._tensor_rank, self._sharing = number, tensor_rank, sharing
        config = layer.mlp.router.config
        self._scores_are_shares = config.moe_router_pre_softmax
        self._scores_are_sigmoids = config.moe_router_score_function == "sigmoid"
        self._router = layer.mlp.router
        self._microbatch: MicrobatchRouting | None = None
        layer.mlp.router.router_replay = self
        layer.register_forward_pre_hook(self._begin, with_kwargs=True)
        if layer.mlp.moe_layer_recompute:
            # Megatron would recompute the experts in the backward pass with the microbatch that the router processed
            # last.
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

        output: MLPOutput = checkpoint(of_microbatch, False, hidden)
        return output

    def get_replay_topk(
        self,
        scores_TE: Tensor,
        chosen: int,
        groups: int | None,
        of_groups: int | None,
        largest: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return (T, K) scores of the chosen experts and (T, K) indices. Megatron's router determines the signature."""
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
        own = slice(self._tensor_rank * n_tokens, (self._tensor_rank + 1) * n_tokens)
        counted_T, members_TE = microbatch.counted_l[own], _members(experts_TK, n_experts)
        known_T = changed_T = torch.zeros_like(counted_T)
        if microbatch.replayed_LlK is not None:
            replayed_TK = microbatch.replayed_LlK[self._number, own].long()
            nearest_TK = replayed_TK.clamp(0, n_experts - 1)  # equal to the replayed index if the index is valid
            replayed_TE = _members(nearest_TK, n_experts)
            known_T = (nearest_TK == replayed_TK).all(1) & (replayed_TE.sum(1) == chosen)
            changed_T = known_T & (replayed_TE & ~members_TE).any(1)
            experts_TK = torch.where(known_T[:, None], replayed_TK, experts_TK)
            members_TE = torch.where(known_T[:, None], replayed_TE, members_TE)
            values_TK = scores_TE.gather(1, experts_TK)
        counts_T2 = torch.stack([known_T, changed_T], dim=1)
        counted = torch.cat([members_TE, counts_T2], dim=1) & counted_T[:, None]
        microbatch.reports[self._number] = counted.sum(0)
        if microbatch.balance is not None and torch.is_grad_enabled():
            loss = self._balancing_loss(scores_TE, members_TE, microbatch.balance, own) / chosen
            microbatch.losses[self._number] = loss.detach()
            values_TK = MoEAuxLossAutoScaler.apply(values_TK, loss)
        return values_TK, experts_TK

    def _balancing_loss(self, scores_TE: Tensor, members_TE: Tensor, balance: Balance, own: slice) -> Tensor:
        """Return the weighted load-balancing loss of this rank's tokens, times K.

        For a sample of T tokens, the loss is E sum_e n_e sum_t p_te / T^2. n_e is the number of tokens of expert e.
        p_te is the expert's share of a token's softmax, or of the token's sum of sigmoids. The loss equals K if both
        are uniform.
        """
        sample_T, weights_T = balance.sample_l[own], balance.weights_l[own]
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
    """Return (L, E + 2): the counts of all microbatches, with one row for each layer with experts. Return None if
    there are no reports."""
    reports = [
        torch.stack([microbatch.reports[number] for number in sorted(microbatch.reports)])
        for microbatch in microbatches
        if microbatch is not None and microbatch.reports
    ]
    return torch.stack(reports).sum(0) if reports else None


def summed_losses(microbatches: Iterable[MicrobatchRouting | None]) -> float:
    """Return the weighted load-balancing loss, summed over microbatches and the layers of this rank."""
    losses = [loss for microbatch in microbatches if microbatch is not None for loss in microbatch.losses.values()]
    return float(torch.stack(losses).sum()) if losses else 0.0
