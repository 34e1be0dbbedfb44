"""The experts of a layer as grouped products, in place of Megatron's `SequentialMLP`.

Megatron-Core's experts for machines without Transformer Engine are a list of MLPs that run one after the other, the
numbers of their rows read on the host. Here they are two stacked weights and two products.

Shape legend: L experts of this rank, R rows that it has for them; H hidden size, F size of an expert.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear  # `grouped_mm`: since torch 2.10

from megappo.megatron.swiglu import SwiGLU, is_swiglu, mlp_submodules, submodules
from megappo_kernels.clamped import ClampedSwiGLU
from megappo_kernels.layers import swiglu

if TYPE_CHECKING:
    from megappo.megatron.lora import ExpertAdapter

_GROUPED_TYPES = (torch.bfloat16, torch.float32)
_GROUPED_ROW_BYTES = 16


def takes_grouped(dtype: torch.dtype, *widths: int) -> bool:
    """Whether torch's grouped product, forward and backward, takes matrices whose rows have these widths."""
    return dtype in _GROUPED_TYPES and all(width * dtype.itemsize % _GROUPED_ROW_BYTES == 0 for width in widths)


def expert_products(rows_RI: Tensor, weight_LOI: Tensor, counts_L: Tensor) -> Tensor:
    """(R, O): each row times the transposed weight of its expert; `counts_L` rows of each stand in the experts' order.

    Where torch has no grouped product for the type or the widths, or there is no row, one product after the other, for
    which the host reads the counts.
    """
    if len(rows_RI) and takes_grouped(rows_RI.dtype, *weight_LOI.shape[1:]):
        return grouped_mm(rows_RI, weight_LOI.transpose(1, 2), offs=counts_L.cumsum(0, dtype=torch.int32))
    counts = counts_L.tolist() if len(rows_RI) else [0] * len(weight_LOI)
    parts = zip(rows_RI.split(counts), weight_LOI.unbind(), strict=True)
    return torch.cat([linear(part, weight) for part, weight in parts])


class _OfRows(torch.autograd.Function):
    """Torch's own gradient of a gather adds rows up in whatever order they come on a GPU."""

    @staticmethod
    def forward(ctx: Any, bias_LO: Tensor, counts_L: Tensor, n_rows: int) -> Tensor:
        ctx.save_for_backward(counts_L)
        return bias_LO.repeat_interleave(counts_L, dim=0, output_size=n_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (counts_L,), grad = ctx.saved_tensors, grads[0]
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
        sums = torch.segment_reduce(wide, "sum", lengths=counts_L, axis=0, unsafe=True)
        return sums.to(grad.dtype), None, None


class RowBias(nn.Module):
    """What is added to the rows of each expert. A module, so that its parameter's name ends with `.bias`: Megatron's
    optimizer lets the weights of such decay nothing."""

    def __init__(self, bias_LO: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias_LO)

    def forward(self, counts_L: Tensor, n_rows: int) -> Tensor:
        """(R, O): the bias of each row's expert; `counts_L` rows of each stand in the experts' order."""
        found: Tensor = _OfRows.apply(self.bias, counts_L, n_rows)
        return found


class GroupedExperts(MegatronModule):
    """This rank's experts of a layer, each of them whole."""

    def __init__(self, n_experts: int, config: TransformerConfig, **_of_megatron: Any) -> None:
        """As Megatron's layer calls it; the rest is process groups and, in 0.19, a name."""
        super().__init__(config=config)
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        assert ffn is not None
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        made = partial(torch.empty, dtype=config.params_dtype, device=device)
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
        """(R, H): what the expert of each row makes of it, biases and all, times the row's weight; and nothing that is
        to be added."""
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
        """The activation times the weights of the rows, which the router makes in float32."""
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
    """Put them into the spec of a layer. `shares_one`: there is an expert that every token passes."""
    inner = mlp_submodules(layer)
    inner.experts = GroupedExperts
    if shares_one:
        submodules(inner.shared_experts).activation_func = SwiGLU
