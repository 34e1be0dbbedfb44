"""Which experts compute a token: those with the largest scores, or those that the engine chose when it sampled.

Engine and trainer round differently, and where two experts score alike the same token goes to others: its
log-probability jumps, and the update learns of a policy that did not sample (Ma et al. 2025, arXiv:2510.11370).
With the engine's choice replayed, routers still compute every score and gradient themselves; they are told which of the
scores count. The weights of a token's experts are made of those as they would be of the largest.

Megatron has a place for that at its routers, `router_replay`, and a class of its own (moe/router_replay.py) which keeps
what is to be replayed in lists that all roles of a process share and that a pipeline empties by turns. Here it belongs
to the microbatch: each layer is given the microbatch's segments, in forward and when it is computed again.

Shape legend: l tokens of a microbatch on this context rank, T of them on this tensor rank; L layers of this rank, E
experts, K of them for each token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from torch import Tensor

FURTHER = 2
"""Numbers of a report behind those of the experts."""


@dataclass
class MicrobatchRouting:
    """What the routers of a rank are told of a microbatch, and what they say of it."""

    counted_l: Tensor
    """bool: tokens of samples; not padding, and not those of a filler."""
    given_LlK: Tensor | None = None
    """The experts of each token. Where K different ones are not given the router chooses."""
    reports: dict[int, Tensor] = field(default_factory=dict)
    """By layer: see `RouterChoice`. A layer that is computed again says the same again."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> MicrobatchRouting:
        """From what `routing_tensors` made, on the device."""
        return cls(tensors["counted"], tensors.get("given"))


def routing_tensors(
    lengths: Sequence[int], padded: Sequence[int], places_l: Tensor, routings: Sequence[Tensor], *, counts: bool
) -> dict[str, Tensor]:
    """What routers are told of a pack, on the host.

    Args:
        lengths: tokens of each sample.
        padded: what each takes up in the pack, and behind them what fills it up.
        places_l: where the tokens of this rank stand in the pack.
        routings: (tokens - 1, L, K) of each sample, or nothing.
        counts: whether the samples count.
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
    return found


def _members(experts_TK: Tensor, n_experts: int) -> Tensor:
    """(T, E) bool: the experts that are among them."""
    members = torch.zeros(len(experts_TK), n_experts, dtype=torch.bool, device=experts_TK.device)
    return members.scatter_(1, experts_TK, True)


class RouterChoice:
    """Stands at `router_replay` of a layer's router, which asks it for a choice.

    Reports (E + 2,) int64 of each microbatch: the tokens that went to each expert; those whose experts were given; and
    those of them whom the router would have sent to others.
    """

    def __init__(self, layer: Any, number: int, tensor_rank: int) -> None:
        """`number`: of the layer among this rank's."""
        self._number, self._tensor_rank = number, tensor_rank
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
        return values_TK, experts_TK


def summed_reports(microbatches: Iterable[MicrobatchRouting | None]) -> Tensor | None:
    """(L, E + 2): the reports of all microbatches, layer by layer; None of a dense model."""
    found = [
        torch.stack([microbatch.reports[number] for number in sorted(microbatch.reports)])
        for microbatch in microbatches
        if microbatch is not None
    ]
    return torch.stack(found).sum(0) if found else None
