"""Experts of a layer as grouped products, which replace `SequentialMLP` of Megatron.

Without Transformer Engine, the experts of Megatron-Core are a list of MLPs that run one after the other. The host
reads the number of rows of each expert. Here, the experts are two stacked weights and two grouped products.

Shape legend: L experts of this rank, R rows that the rank receives for its experts; H hidden size, F intermediate size
of an expert.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megappo.megatron.layers.lora import ExpertAdapter
from megappo.megatron.layers.parallel import expert_products, new_weight
from megappo.megatron.layers.swiglu import SwiGLU, is_swiglu, mlp_submodules, submodules
from megappo_kernels.autograd import Context
from megappo_kernels.clamped import ClampedSwiGLU
from megappo_kernels.layers import swiglu


class _OfRows(torch.autograd.Function):
    """Repetition of each expert's bias for its rows. The gradient is a segmented sum, because torch's gradient of a
    gather adds rows in an undetermined order on a GPU."""

    @staticmethod
    def forward(ctx: Context, bias_LO: Tensor, counts_L: Tensor, n_rows: int) -> Tensor:
        ctx.save_for_backward(counts_L)
        return bias_LO.repeat_interleave(counts_L, dim=0, output_size=n_rows)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        (counts_L,), grad = ctx.saved_tensors, grads[0]
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
        sums = torch.segment_reduce(wide, "sum", lengths=counts_L, axis=0, unsafe=True)
        return sums.to(grad.dtype), None, None


class RowBias(nn.Module):
    """Biases of the rows of each expert. The separate module makes the parameter's name end with `.bias`, and the
    optimizer of Megatron applies no weight decay to such names."""

    def __init__(self, bias_LO: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias_LO)

    def forward(self, counts_L: Tensor, n_rows: int) -> Tensor:
        """Return (R, O): the bias of each row's expert. Rows are sorted by expert. `counts_L` is the number of rows of
        each expert."""
        bias_RO: Tensor = _OfRows.apply(self.bias, counts_L, n_rows)
        return bias_RO


class GroupedExperts(MegatronModule):
    """Experts of a layer on this rank. No expert is split over ranks."""

    def __init__(self, n_experts: int, config: TransformerConfig, **_of_megatron: Any) -> None:
        """Create the experts with the arguments that Megatron's layer passes. The ignored arguments are process groups
        and, in 0.19, a name."""
        super().__init__(config=config)
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        assert ffn is not None
        made = partial(new_weight, config)
        self.weight1 = nn.Parameter(made(n_experts, ffn * (2 if config.gated_linear_unit else 1), hidden))
        self.weight2 = nn.Parameter(made(n_experts, hidden, ffn))
        self.bias1: RowBias | None = None
        self.bias2: RowBias | None = None
        if config.add_bias_linear:
            self.bias1 = RowBias(made(*self.weight1.shape[:2]))
            self.bias2 = RowBias(made(n_experts, hidden))
        self.lora1: ExpertAdapter | None = None
        self.lora2: ExpertAdapter | None = None

    def forward(self, rows_RH: Tensor, counts_L: Tensor, weights_R: Tensor) -> tuple[Tensor, None]:
        """Return (R, H), the output of each row's expert including biases, times the weight of the row. The second
        value is None, because the caller has no bias to add."""
        inner = expert_products(rows_RH, self.weight1, counts_L)
        if self.bias1 is not None:
            inner = inner + self.bias1(counts_L, len(rows_RH))
        if self.lora1 is not None:
            inner = self.lora1.add_to(inner, rows_RH, counts_L)
        inner = self._weighted(inner, weights_R)
        output = expert_products(inner, self.weight2, counts_L)
        if self.bias2 is not None:
            output = output + (self.bias2(counts_L, len(rows_RH)) * weights_R.unsqueeze(-1)).to(output.dtype)
        if self.lora2 is not None:
            output = self.lora2.add_to(output, inner, counts_L)
        return output, None

    def _weighted(self, inner: Tensor, weights_R: Tensor) -> Tensor:
        """Return the activation times the weights of the rows. The router computes these weights in float32."""
        if is_swiglu(vars(self.config)):
            return swiglu(inner, weights_R)
        activation = self.config.activation_func
        if isinstance(activation, ClampedSwiGLU):
            return activation(inner, weights_R)
        if self.config.gated_linear_unit:
            gate, up = inner.chunk(2, dim=-1)
            product = activation(gate) * up
        else:
            product = activation(inner)
        return (product * weights_R.unsqueeze(-1)).to(product.dtype)


def use_grouped_experts(layer: ModuleSpec, *, shares_one: bool = False) -> None:
    """Put `GroupedExperts` into the spec of a layer. `shares_one` is true if the layer has a shared expert for all
    tokens."""
    inner = mlp_submodules(layer)
    inner.experts = GroupedExperts
    if shares_one:
        submodules(inner.shared_experts).activation_func = SwiGLU
