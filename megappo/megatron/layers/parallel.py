"""Common functions of megappo's layers: weights, matrices and inputs under tensor parallelism, and grouped products of
experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import grouped_mm, linear  # `grouped_mm`: since torch 2.10

from megappo_kernels.gemm import takes_grouped


def new_weight(config: TransformerConfig, *shape: int) -> Tensor:
    """Return memory for a weight of a layer on the device on which Megatron allocates its own layers."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return torch.empty(shape, dtype=config.params_dtype, device=device)


def parallel_settings(config: TransformerConfig, group: dist.ProcessGroup) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of Megatron's column parallel layers and of its row parallel layers, without biases."""
    of_both = {"config": config, "bias": False, "is_expert": False, "tp_group": group}
    of_rows = {"init_method": config.output_layer_init_method, "input_is_parallel": True, "skip_bias_add": True}
    return {**of_both, "init_method": config.init_method, "gather_output": False}, {**of_both, **of_rows}


def whole_input(part: Tensor, group: dist.ProcessGroup, *, sequence_parallel: bool) -> Tensor:
    """Return the input of all tokens: (l, ...) -> (t, ...). Each tensor parallel rank multiplies this input by its own
    rows.

    With sequence parallelism, l is the rank's part of t. Otherwise, l is t. The backward pass sums the gradients of
    all ranks.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=True, group=group)
    return copy_to_tensor_model_parallel_region(part, group=group)


def expert_products(rows_RI: Tensor, weight_LOI: Tensor, counts_L: Tensor) -> Tensor:
    """Return (R, O): each row times the transposed weight of its expert. Rows are sorted by expert. `counts_L` is the
    number of rows of each expert.

    Experts are computed one after the other if torch has no grouped product for the type or the widths, or if there
    are no rows. The host then reads the counts.
    """
    if len(rows_RI) and takes_grouped(rows_RI.dtype, *weight_LOI.shape[1:]):
        return grouped_mm(rows_RI, weight_LOI.transpose(1, 2), offs=counts_L.cumsum(0, dtype=torch.int32))
    counts = counts_L.tolist() if len(rows_RI) else [0] * len(weight_LOI)
    parts = zip(rows_RI.split(counts), weight_LOI.unbind(), strict=True)
    return torch.cat([linear(part, weight) for part, weight in parts])
