"""What layers of our own have in common under tensor parallelism: their weights, matrices and inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def new_weight(config: TransformerConfig, *shape: int) -> Tensor:
    """Memory for a weight of a layer, where Megatron allocates those of its own layers."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return torch.empty(shape, dtype=config.params_dtype, device=device)


def parallel_settings(config: TransformerConfig, group: dist.ProcessGroup) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of Megatron's column parallel layers and of its row parallel ones, without biases."""
    of_both = {"config": config, "bias": False, "is_expert": False, "tp_group": group}
    of_rows = {"init_method": config.output_layer_init_method, "input_is_parallel": True, "skip_bias_add": True}
    return {**of_both, "init_method": config.init_method, "gather_output": False}, {**of_both, **of_rows}


def whole_input(part: Tensor, group: dist.ProcessGroup, *, sequence_parallel: bool) -> Tensor:
    """(l, ...) -> (t, ...): the numbers of all tokens, which each tensor parallel rank multiplies by rows of its own.

    l is a sequence parallel rank's part of t, else t. Backward sums the gradients of all ranks.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=True, group=group)
    return copy_to_tensor_model_parallel_region(part, group=group)
