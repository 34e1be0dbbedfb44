"""Dispatch of tokens to their experts and back, without reading the routing on the host.

Megatron-Core's dispatcher finds the rows of routed tokens by `masked_select`, twice, and sorts received rows with each
expert's count as a host number: in every layer and pass, even where one rank has all experts. Here orders are computed
on the device from known sizes. The host reads only one thing, where ranks split the experts: how many rows they send
each other, which collectives need.

Shape legend: T tokens of this rank, E experts, K of them for each token, N = T K rows; P ranks that split the experts,
L experts of this rank, R rows that it receives; H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megappo_kernels.autograd import Context


@dataclass(frozen=True)
class Reordering:
    """Maps old rows to new ones; each old row has K copies among the new rows."""

    sources_N: Tensor
    """(N,) int64: the old row that each new row is a copy of."""
    copies_TK: Tensor
    """(T, K) int64: the new rows that are copies of each old row."""

    def spread(self, rows: Tensor) -> Tensor:
        """(T, H) -> (N, H)."""
        spread: Tensor = _Spread.apply(rows, self.sources_N, self.copies_TK)
        return spread

    def collect(self, rows: Tensor) -> Tensor:
        """(N, H) -> (T, H): the sum over the copies of each row; the gradient of `spread`."""
        collected: Tensor = _Collect.apply(rows, self.sources_N, self.copies_TK)
        return collected


def _sums(rows: Tensor, copies_TK: Tensor) -> Tensor:
    copies = rows.index_select(0, copies_TK.flatten())
    return copies if copies_TK.shape[1] == 1 else copies.unflatten(0, copies_TK.shape).sum(1)


class _Spread(torch.autograd.Function):
    """Gather of rows whose gradient is a sum in a fixed order; torch's gradient of a gather adds rows in an
    undetermined order on a GPU."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, sources_N: Tensor, copies_TK: Tensor) -> Tensor:
        ctx.save_for_backward(copies_TK)
        return rows.index_select(0, sources_N)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _sums(grads[0], *ctx.saved_tensors), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, rows: Tensor, sources_N: Tensor, copies_TK: Tensor) -> Tensor:
        ctx.save_for_backward(sources_N)
        return _sums(rows, copies_TK)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None


def by_expert(experts_N: Tensor, chosen: int) -> tuple[Reordering, Tensor]:
    """Order rows by expert, and by token within an expert. Returns the reordering of tokens, and (N,) the old index of
    each row.

    `experts_N`: the expert of each row; rows are in the order of tokens, `chosen` rows each.
    """
    order_N = experts_N.argsort(stable=True)
    places_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    return Reordering(order_N // chosen, places_N.view(-1, chosen)), order_N


def by_own_expert(counts_PL: Tensor, n_rows: int) -> Reordering:
    """Order received rows by expert, and by sender within an expert. They arrive by sender; `counts_PL`: rows from each
    sender for each expert."""
    return Reordering(_transposed(counts_PL, n_rows), _transposed(counts_PL.T, n_rows).unsqueeze(1))


def _transposed(counts_AB: Tensor, n_rows: int) -> Tensor:
    """(R,): where the rows in the order (b, a) are in the order (a, b); each pair has a run of `counts_AB` rows."""
    shifts_AB = _starts(counts_AB) - _starts(counts_AB.T).T
    rows = torch.arange(n_rows, device=counts_AB.device)
    return rows + shifts_AB.T.flatten().repeat_interleave(counts_AB.T.flatten(), output_size=n_rows)


def _starts(counts_AB: Tensor) -> Tensor:
    flat = counts_AB.flatten()
    return (flat.cumsum(0) - flat).view(counts_AB.shape)


class _OnItsWay:
    """Numbers whose copy to the host is started now and read later, without waiting for other work of the device."""

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
    """Sends rows to their experts and back; Megatron's layer calls the methods in the order in which they stand here.

    No token is dropped and nothing is padded. An expert is whole on its rank.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config=config, pg_collection=groups)
        assert self.tp_size == 1 and config.num_moe_experts and config.moe_expert_capacity_factor is None
        self._experts_here = config.num_moe_experts // self.ep_size

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (N, H) rows and their (N,) weights. `tokens` is (..., H); the routing map and the weights `probs` are
        (T, E)."""
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
        """Exchange counts with the other ranks: from the rows sent to each expert to the rows received for each of this
        rank's experts."""
        sent_PL, self._counts_PL = self._counts_PL, torch.empty_like(self._counts_PL)
        # Before the all-to-all of rows: that one needs its sizes on the host, and this leaves time to copy them.
        dist.all_to_all_single(self._counts_PL, sent_PL, group=self.ep_group)
        self._splits = _OnItsWay(torch.stack([sent_PL.sum(1), self._counts_PL.sum(1)]))

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """(R, H) and (R,): rows and weights that all ranks send to this rank's experts."""
        if self.ep_size == 1:
            return hidden_states, probs
        self._sent, self._received = self._splits.read()
        received = [all_to_all(self.ep_group, x, self._received, self._sent) for x in (hidden_states, probs)]
        return received[0], received[1]

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, the count of each expert, and weights, ordered by this rank's experts."""
        counts_L = self._counts_PL.sum(0)
        if self.ep_size == 1:
            return hidden_states, counts_L, probs
        self._by_own_expert = by_own_expert(self._counts_PL, len(hidden_states))
        weights_R = probs.index_select(0, self._by_own_expert.sources_N)
        return self._by_own_expert.spread(hidden_states), counts_L, weights_R

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Rows in the order in which they arrived."""
        if self.ep_size == 1:
            return hidden_states
        rows = self._by_own_expert.collect(hidden_states)
        del self._by_own_expert  # autograd keeps what backward needs
        return rows

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """(N, H): rows sent back to the ranks they came from."""
        if self.ep_size == 1:
            return hidden_states
        return all_to_all(self.ep_group, hidden_states, self._sent, self._received)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """(..., H): the sum over each token's experts."""
        output = self._by_expert.collect(hidden_states).view(self._shape)
        del self._by_expert
        return output
