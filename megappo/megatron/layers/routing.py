"""Dispatch of tokens to their experts and back. The host does not read the routing.

The dispatcher of Megatron-Core selects the rows of routed tokens with two calls of `masked_select`, and sorts received
rows by the counts of experts on the host. These steps run in every layer and pass, even if one rank has all experts.
Here, the device computes all orders from known sizes. The host reads only the numbers of rows that ranks exchange,
because collectives need these numbers if ranks split the experts.

Shape legend: T tokens of this rank, E experts, K experts of each token, N = T K rows; P ranks that split the experts,
L experts of this rank, R rows that the rank receives; H hidden size.
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
    """Mapping of old rows to new rows. Each old row has K copies among the new rows."""

    sources_N: Tensor
    """Old row of each new row, (N,) int64."""
    copies_TK: Tensor
    """New rows that are copies of each old row, (T, K) int64."""

    def spread(self, rows: Tensor) -> Tensor:
        """Convert (T, H) to (N, H)."""
        spread: Tensor = _Spread.apply(rows, self.sources_N, self.copies_TK)
        return spread

    def collect(self, rows: Tensor) -> Tensor:
        """Convert (N, H) to (T, H) by a sum over the copies of each row. This sum is the gradient of `spread`."""
        collected: Tensor = _Collect.apply(rows, self.sources_N, self.copies_TK)
        return collected


def _sums(rows: Tensor, copies_TK: Tensor) -> Tensor:
    copies = rows.index_select(0, copies_TK.flatten())
    return copies if copies_TK.shape[1] == 1 else copies.unflatten(0, copies_TK.shape).sum(1)


class _Spread(torch.autograd.Function):
    """Gather of rows with a gradient that adds rows in a fixed order. Torch's gradient of a gather adds rows in an
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
    """Order rows by expert, and by token within an expert. Return the reordering of tokens, and the old index of each
    row as (N,).

    `experts_N` is the expert of each row. Rows are in the order of tokens, with `chosen` rows for each token.
    """
    order_N = experts_N.argsort(stable=True)
    places_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    return Reordering(order_N // chosen, places_N.view(-1, chosen)), order_N


def by_own_expert(counts_PL: Tensor, n_rows: int) -> Reordering:
    """Order received rows by expert, and by sender within an expert. Received rows are ordered by sender. `counts_PL`
    is the number of rows from each sender for each expert."""
    return Reordering(_transposed(counts_PL, n_rows), _transposed(counts_PL.T, n_rows).unsqueeze(1))


def _transposed(counts_AB: Tensor, n_rows: int) -> Tensor:
    """Return (R,): the positions of the rows of the order (b, a) in the order (a, b). Each pair has a run of
    `counts_AB` rows."""
    shifts_AB = _starts(counts_AB) - _starts(counts_AB.T).T
    rows = torch.arange(n_rows, device=counts_AB.device)
    return rows + shifts_AB.T.flatten().repeat_interleave(counts_AB.T.flatten(), output_size=n_rows)


def _starts(counts_AB: Tensor) -> Tensor:
    flat = counts_AB.flatten()
    return (flat.cumsum(0) - flat).view(counts_AB.shape)


class _OnItsWay:
    """Numbers with an asynchronous copy to the host. A later read waits only for the copy and for no other work of the
    device."""

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
    """Dispatcher that sends rows to their experts and back. The layer of Megatron calls the methods in the order of
    their definitions.

    No token is dropped and no padding is added. Each expert is on one rank.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config=config, pg_collection=groups)
        assert self.tp_size == 1 and config.num_moe_experts and config.moe_expert_capacity_factor is None
        self._local_experts = config.num_moe_experts // self.ep_size

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return (N, H) rows and their (N,) weights. `tokens` is (..., H). The routing map and the weights `probs` are
        (T, E)."""
        self._shape, chosen = tokens.shape, self.config.moe_router_topk
        n_tokens, n_experts = routing_map.shape
        cells_N = routing_map.flatten().nonzero_static(size=n_tokens * chosen).flatten()
        self._by_expert, order_N = by_expert(cells_N % n_experts, chosen)
        self._counts_PL = routing_map.sum(0).view(self.ep_size, self._local_experts)
        if self.ep_size > 1:
            self._exchange_counts()
        weights_N = probs.flatten().index_select(0, cells_N.index_select(0, order_N))
        return self._by_expert.spread(tokens.reshape(-1, self._shape[-1])), weights_N

    def _exchange_counts(self) -> None:
        """Exchange counts with the other ranks. The input is the number of rows that this rank sends to each expert,
        and the result is the number of rows that it receives for each of its experts."""
        sent_PL, self._counts_PL = self._counts_PL, torch.empty_like(self._counts_PL)
        # The all-to-all of rows needs its sizes on the host. An earlier exchange of counts leaves time for the copy.
        dist.all_to_all_single(self._counts_PL, sent_PL, group=self.ep_group)
        self._splits = _OnItsWay(torch.stack([sent_PL.sum(1), self._counts_PL.sum(1)]))

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return (R, H) rows and (R,) weights that all ranks send to the experts of this rank."""
        if self.ep_size == 1:
            return hidden_states, probs
        self._sent, self._received = self._splits.read()
        received = [all_to_all(self.ep_group, x, self._received, self._sent) for x in (hidden_states, probs)]
        return received[0], received[1]

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, the number of rows of each expert, and weights, ordered by the experts of this rank."""
        counts_L = self._counts_PL.sum(0)
        if self.ep_size == 1:
            return hidden_states, counts_L, probs
        self._by_own_expert = by_own_expert(self._counts_PL, len(hidden_states))
        weights_R = probs.index_select(0, self._by_own_expert.sources_N)
        return self._by_own_expert.spread(hidden_states), counts_L, weights_R

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return rows in the order of their arrival."""
        if self.ep_size == 1:
            return hidden_states
        rows = self._by_own_expert.collect(hidden_states)
        del self._by_own_expert  # autograd keeps the tensors for the backward pass
        return rows

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Return (N, H): rows after their return to the ranks of their tokens."""
        if self.ep_size == 1:
            return hidden_states
        return all_to_all(self.ep_group, hidden_states, self._sent, self._received)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return (..., H): the sum over the experts of each token."""
        output = self._by_expert.collect(hidden_states).view(self._shape)
        del self._by_expert
        return output
