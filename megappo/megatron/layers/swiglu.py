"""SwiGLU in the layers of Megatron: one kernel on CUDA, with or without Transformer Engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.nn.functional import silu

from megappo_kernels.layers import swiglu

if TYPE_CHECKING:
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.moe_layer import MoESubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig


def is_swiglu(settings: Mapping[str, Any]) -> bool:
    """Return whether fields of Megatron's TransformerConfig describe an MLP with silu(gate) * up."""
    return settings.get("activation_func") is silu and bool(settings.get("gated_linear_unit"))


class SwiGLU(nn.Module):
    """Replacement for `activation_func` of an MLP's submodules. Megatron builds the module if `use_te_activation_func`
    is true. This setting is the only hook for an activation with gate and up in one tensor."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        """Convert (t, 1, 2F) to (t, 1, F)."""
        return swiglu(gate_up)


def mlp_submodules(layer: ModuleSpec) -> MLPSubmodules | MoESubmodules:
    """Return the submodules of the MLP or of the experts in a layer's spec."""
    return submodules(layer.submodules.mlp)


def submodules(module: ModuleSpec | partial[nn.Module]) -> MLPSubmodules | MoESubmodules:
    """Return the submodules of a module's spec. Megatron-Core 0.16 has a spec. Megatron-Core 0.19 has a function
    (`functools.partial`) that builds the module."""
    return module.keywords["submodules"] if isinstance(module, partial) else module.submodules
