"""Common functions of megappo's layers under tensor parallelism: weights, matrices and inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


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
