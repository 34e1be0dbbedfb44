"""The GPT model of Megatron without its output layer, and the output layers of the actor and the critic.

GPTModel calls its output layer with a weight and `runtime_gather_output`, and returns one tensor. Megatron-Core 0.16
passes no other arguments to the layer; `labels`, `loss_mask` and `extra_block_kwargs` are for Megatron's cross-entropy
and for the layers. (0.19 adds `output_processor`.) The models of megappo therefore return hidden states. The task of a
pass calls the output layer with the microbatch and the inputs of the loss, in `loss_func` of Megatron's schedules (see
`schedule`). Only rows that predict response tokens are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from megappo.megatron.layout import Layout
from megappo.megatron.schedule import PackedBatch
from megappo_kernels.lm_head import linear_logprob
from megappo_kernels.losses import PolicyInputs
from megappo_kernels.objectives import PolicyObjective
from megappo_kernels.ppo_head import ppo_head_loss
from megappo_kernels.rows import Exclusion


class HiddenStatesModel(GPTModel):
    """GPT model that returns hidden states [t, 1, H] on every stage. `output_layer` is `LogprobHead` or `ValueHead` on
    the last stage, where it remains part of the model for names, tied embeddings, optimizers and checkpoints."""

    def _postprocess(self, hidden_states: Tensor, **_of_megatron: Any) -> Tensor:
        """Replace Megatron's call of the output layer, which follows the layers (0.16.1 / 0.19.2, gpt_model.py:559 /
        620)."""
        return hidden_states


def _select(hidden_t1H: Tensor, batch: PackedBatch, layout: Layout, *, partial_gradients: bool) -> Tensor:
    """Return the rows (n, H) of hidden states, or of their sequence parallel part, that predict response tokens.

    `partial_gradients` is true if the gradient of each tensor rank is a part of a sum (the head is split over ranks),
    and false if the gradient is complete (the head is replicated).
    """
    if layout.sequence_parallel:
        hidden_t1H = gather_from_sequence_parallel_region(
            hidden_t1H, tensor_parallel_output_grad=partial_gradients, group=layout.groups.tp
        )
    return hidden_t1H.squeeze(1).index_select(0, batch.rows_N)


class LogprobHead(nn.Module):
    """Language model head: log-probabilities of the response tokens, or the policy loss of an update."""

    def __init__(
        self,
        layout: Layout,
        weight: nn.Parameter,
        *,
        is_tied: bool,
        vocab_size: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        cap: float | None,
    ) -> None:
        """Create the head. `is_tied`: whether the weight is the embedding of the same stage, which has the parameter.
        `stop_token_ids` are the tokens that the distributions of `below_minimum` rows exclude. With `cap`, logits
        become cap * tanh(logits / cap) before the temperature."""
        super().__init__()
        self.layout = layout
        self.weight = None if is_tied else weight
        self._matrix = (weight,)  # torch does not register the parameters of a tuple
        self._where: dict[str, Any] = {
            "temperature": temperature, "tp_group": layout.groups.tp, "valid_vocab": vocab_size, "softcap": cap,
            "sequence_parallel": layout.sequence_parallel,
        }  # fmt: skip
        self._stop_token_ids = tuple(stop_token_ids)

    def forward(
        self,
        hidden_t1H: Tensor,
        batch: PackedBatch,
        inputs: PolicyInputs | None = None,
        objective: PolicyObjective | None = None,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the log-probabilities (n,) of the response tokens in nats, float32. With `inputs`, return the policy
        loss of `objective` and its metrics instead.

        With `inputs`, the forward pass already adds the gradient of the weight to its `main_grad` (see
        `ppo_head_loss`).
        """
        (matrix,), marked_N = self._matrix, batch.below_minimum_N
        rows_NH = _select(hidden_t1H, batch, self.layout, partial_gradients=True)
        where = {
            **self._where,
            "exclusion": None if marked_N is None else Exclusion(marked_N, self._stop_token_ids),
        }
        if inputs is None:
            return linear_logprob(rows_NH, matrix, batch.labels_N, entropy=False, **where)[0], {}
        result = ppo_head_loss(
            rows_NH,
            matrix,
            batch.labels_N,
            inputs,
            objective=objective,
            context_group=self.layout.groups.cp if self.layout.grid.cp > 1 else None,
            accumulate_main_grad=matrix.requires_grad,
            **where,
        )
        return result.loss, result.metrics


class ValueHead(nn.Module):
    """Scalar head of the critic, replicated over tensor ranks. The head computes in float32 for all types of the
    trunk."""

    def __init__(self, layout: Layout, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layout = layout
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))

    def forward(self, hidden_t1H: Tensor, batch: PackedBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the value (n,) of the state before each response token, float32, and no metrics."""
        rows_NH = _select(hidden_t1H, batch, self.layout, partial_gradients=False).float()
        return (rows_NH @ self.weight.float().T + self.bias.float())[:, 0], {}
