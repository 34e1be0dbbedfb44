"""The way of tokens to their experts and back, without a look at the routing from the host.

Megatron-Core's dispatcher finds the places of the routed tokens by `masked_select`, twice, and sorts what came by the
counts of each expert as host numbers: in every layer and pass, also where one rank has all experts. Here orders are
computed on the device, from sizes that are known. One thing is left to read, where ranks share out the experts: how
many rows they send each other, which collectives want to know.

Shape legend: T tokens of this rank, E experts, K of them for each token, N = T K rows; P ranks that share out the
experts, L experts of this rank, R rows that it receives; H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


@dataclass(frozen=True)
class Reordering:
    """New rows of old ones, each of which has K copies among them."""

    sources_N: Tensor
    """(N,) int64: the old row that a new one is a copy of."""
    copies_TK: Tensor
    """(T, K) int64: where the copies of an old row stand."""

    def spread(self, rows: Tensor) -> Tensor:
        """(T, H) -> (N, H)."""
        spread: Tensor = _Spread.apply(rows, self.sources_N, self.copies_TK)
        return spread

    def collect(self, rows: Tensor) -> Tensor:
        """(N, H) -> (T, H): the sum over the copies of each row, which is what `spread` does backward."""
        collected: Tensor = _Collect.apply(rows, self.sources_N, self.copies_TK)
        return collected


def _sums(rows: Tensor, copies_TK: Tensor) -> Tensor:
    copies = rows.index_select(0, copies_TK.flatten())
    return copies if copies_TK.shape[1] == 1 else copies.unflatten(0, copies_TK.shape).sum(1)


class _Spread(torch.autograd.Function):
    """Torch's own gradient of a gather adds rows up in whatever order they come on a GPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sources_N: Tensor, copies_TK: Tensor) -> Tensor:
        ctx.save_for_backward(copies_TK)
        return rows.index_select(0, sources_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _sums(grads[0], *ctx.saved_tensors), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sources_N: Tensor, copies_TK: Tensor) -> Tensor:
        ctx.save_for_backward(sources_N)
        return _sums(rows, copies_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None


def by_expert(experts_N: Tensor, chosen: int) -> tuple[Reordering, Tensor]:
    """The order of the rows by expert, and by token within one: of the tokens, and (N,) of the rows themselves.

    `experts_N`: the expert of each row, in the order of the tokens, which have `chosen` rows each.
    """
    order_N = experts_N.argsort(stable=True)
    places_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    return Reordering(order_N // chosen, places_N.view(-1, chosen)), order_N


def by_own_expert(counts_PL: Tensor, n_rows: int) -> Reordering:
    """The order by expert, and by sender within one, of rows that came by sender; `counts_PL` came from each."""
    return Reordering(_transposed(counts_PL, n_rows), _transposed(counts_PL.T, n_rows).unsqueeze(1))


def _transposed(counts_AB: Tensor, n_rows: int) -> Tensor:
    """(R,) where the rows in the order (b, a) stand in the order (a, b); each pair has a run of so many rows."""
    shifts_AB = _starts(counts_AB) - _starts(counts_AB.T).T
    rows = torch.arange(n_rows, device=counts_AB.device)
    return rows + shifts_AB.T.flatten().repeat_interleave(counts_AB.T.flatten(), output_size=n_rows)


def _starts(counts_AB: Tensor) -> Tensor:
    flat = counts_AB.flatten()
    return (flat.cumsum(0) - flat).view(counts_AB.shape)


class _OnItsWay:
    """Numbers that the host asks for now and reads later, without waiting for what the device was given meanwhile."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if numbers.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> list[list[int]]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers.tolist()


class TokenDispatcher(MoETokenDispatcher):
    """Brings rows to their experts and back; Megatron's layer calls the methods in the order in which they stand.

    No token is dropped and nothing is padded. An expert is whole on its rank.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config=config, pg_collection=groups)
        assert self.tp_size == 1 and config.num_moe_experts and config.moe_expert_capacity_factor is None
        self._experts_here = config.num_moe_experts // self.ep_size

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """(N, H) and (N,): rows and their weights. Tokens are (..., H), where they are sent to and weights (T, E)."""
        self._shape, chosen = tokens.shape, self.config.moe_router_topk
        n_tokens, n_experts = routing_map.shape
        cells_N = routing_map.flatten().nonzero_static(size=n_tokens * chosen).flatten()
        self._by_expert, order_N = by_expert(cells_N % n_experts, chosen)
        self._counts_PL = routing_map.sum(0).view(self.ep_size, self._experts_here)
        if self.ep_size > 1:
            self._tell_counts()
        weights_N = probs.flatten().index_select(0, cells_N.index_select(0, order_N))
        return self._by_expert.spread(tokens.reshape(-1, self._shape[-1])), weights_N

    def _tell_counts(self) -> None:
        """From how many rows go to each expert to how many come for each of this rank's."""
        sent_PL, self._counts_PL = self._counts_PL, torch.empty_like(self._counts_PL)
        dist.all_to_all_single(self._counts_PL, sent_PL, group=self.ep_group)
        self._splits = _OnItsWay(torch.stack([sent_PL.sum(1), self._counts_PL.sum(1)]))

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """(R, H) and (R,): what the ranks have for this one's experts."""
        if self.ep_size == 1:
            return hidden_states, probs
        self._sent, self._received = self._splits.read()
        received = [all_to_all(self.ep_group, x, self._received, self._sent) for x in (hidden_states, probs)]
        return received[0], received[1]

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, how many each expert has, and weights, in the order of this rank's experts."""
        counts_L = self._counts_PL.sum(0)
        if self.ep_size == 1:
            return hidden_states, counts_L, probs
        self._by_own_expert = by_own_expert(self._counts_PL, len(hidden_states))
        weights_R = probs.index_select(0, self._by_own_expert.sources_N)
        return self._by_own_expert.spread(hidden_states), counts_L, weights_R

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Back to the order in which rows came."""
        if self.ep_size == 1:
            return hidden_states
        rows = self._by_own_expert.collect(hidden_states)
        del self._by_own_expert  # what backward needs of it, autograd holds
        return rows

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """(N, H): to where the rows came from."""
        if self.ep_size == 1:
            return hidden_states
        return all_to_all(self.ep_group, hidden_states, self._sent, self._received)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """(..., H): the sum over each token's experts."""
        output = self._by_expert.collect(hidden_states).view(self._shape)
        del self._by_expert
        return output
