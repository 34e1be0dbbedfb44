"""Output layers that return values for PPO instead of logits.

Both classes replace `output_layer` of GPTModel and keep its interface. `forward(hidden, weight,
runtime_gather_output)` returns (output, None) with the output in Megatron's shape [rows, 1, channels]. Only rows that
predict response tokens are computed. `expect` sets these rows before each microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from megappo.megatron.layout import Layout
from megappo.megatron.schedule import PackedBatch
from megappo_kernels.lm_head import linear_logprob
from megappo_kernels.losses import PolicyInputs
from megappo_kernels.objectives import PolicyObjective
from megappo_kernels.ppo_head import ppo_head_loss
from megappo_kernels.rows import Exclusion


class _Head(nn.Module):
    """Selection of the expected rows of the hidden states, with the whole sequence."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self._rows_N: Tensor | None = None

    def _select(self, hidden: Tensor, *, partial_gradients: bool) -> Tensor:
        """Return the expected rows (n, H) of hidden states (t, 1, H) or of their sequence parallel part.

        `partial_gradients` is true if the gradient of each tensor rank is a part of a sum (the head is split over
        ranks), and false if the gradient is complete (the head is replicated).
        """
        assert self._rows_N is not None, "expect() comes before each forward"
        if self.layout.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=partial_gradients, group=self.layout.groups.tp
            )
        return hidden.squeeze(1).index_select(0, self._rows_N)


@dataclass(frozen=True)
class PolicyTarget:
    """Inputs and objective of a policy update for the response tokens of a microbatch."""

    inputs: PolicyInputs
    objective: PolicyObjective


class LogprobHead(_Head):
    """Language model head. The output is the log-probabilities of the response tokens or the policy loss of an update,
    float32."""

    def __init__(
        self,
        layout: Layout,
        weight: nn.Parameter | None,
        *,
        vocab_size: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        cap: float | None,
    ) -> None:
        """Create the head. `stop_token_ids` are the tokens that the distributions of `below_minimum` rows exclude.
        With `cap`, logits become cap * tanh(logits / cap) before the temperature."""
        super().__init__(layout)
        self.weight = weight  # None if `forward` gets the tied embedding of the same stage
        self._where: dict[str, Any] = {
            "temperature": temperature, "tp_group": layout.groups.tp, "valid_vocab": vocab_size, "softcap": cap,
            "sequence_parallel": layout.sequence_parallel,
        }  # fmt: skip
        self._stop_token_ids = tuple(stop_token_ids)
        self._labels_N: Tensor | None = None
        self._exclusion: Exclusion | None = None
        self._target: PolicyTarget | None = None
        self.report: Mapping[str, Tensor] = {}
        """Metrics of the loss of the last microbatch."""

    def expect(self, batch: PackedBatch, target: PolicyTarget | None = None) -> None:
        """Set the next microbatch and, if given, the loss target."""
        self._rows_N, self._labels_N, self._target = batch.rows_N, batch.labels_N, target
        rows_N = batch.below_minimum_N
        self._exclusion = None if rows_N is None else Exclusion(rows_N, self._stop_token_ids)

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Return log-probabilities in nats as [n, 1, 1] for hidden states [t, 1, H], or with a target the loss as [1,
        1, 1].

        With a target, the forward pass already adds the gradient of the weight to its `main_grad` (see
        `ppo_head_loss`).
        """
        assert self._labels_N is not None
        matrix = weight if weight is not None else self.weight
        assert matrix is not None
        rows_NH = self._select(hidden, partial_gradients=True)
        if self._target is None:
            where = {**self._where, "exclusion": self._exclusion}
            logprob_N, _ = linear_logprob(rows_NH, matrix, self._labels_N, entropy=False, **where)
            return logprob_N[:, None, None], None
        result = ppo_head_loss(
            rows_NH,
            matrix,
            self._labels_N,
            self._target.inputs,
            objective=self._target.objective,
            context_group=self.layout.groups.cp if self.layout.grid.cp > 1 else None,
            accumulate_main_grad=matrix.requires_grad,
            exclusion=self._exclusion,
            **self._where,
        )
        self.report = result.metrics
        return result.loss[None, None, None], None


class ValueHead(_Head):
    """Scalar head of the critic, replicated over tensor ranks. The head computes in float32 for all types of the
    trunk."""

    def __init__(self, layout: Layout, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layout)
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))

    def expect(self, batch: PackedBatch) -> None:
        """Set the next microbatch."""
        self._rows_N = batch.rows_N

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Return the value of the state before each response token, [n, 1, 1], for hidden states [t, 1, H]."""
        rows_NH = self._select(hidden, partial_gradients=False).float()
        values_N = rows_NH @ self.weight.float().T + self.bias.float()
        return values_N.unsqueeze(1), None
