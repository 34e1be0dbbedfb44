"""A custom model family of a user: Arcee, which is Llama with a squared ReLU and no gate in the MLP. Tests build and
train such models with the setting `model.family: package.module:FAMILY`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megappo.families.blocks import Attention, mlp_norm
from megappo.families.declaration import ArchitectureConfig, Block, Family, PerToken, Weight
from megappo.families.reading import decoder, no_attention_bias, no_window


def squared_relu_mlp(c: Any) -> dict[str, Any]:
    if c.hidden_act != "relu2" or c.mlp_bias:
        raise ValueError(f"hidden_act '{c.hidden_act}', mlp_bias {c.mlp_bias}: use a model with relu2 and no biases")
    return {}


class SquaredReluMlp(Block):
    """An MLP with the norm before it: down(relu(up)^2)."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        hidden, ffn = arch.hidden_size, arch.ffn_hidden_size
        return (
            mlp_norm(arch),
            Weight("mlp.linear_fc1.weight", {"mlp.up_proj.weight": (ffn, hidden)}, "column"),
            Weight("mlp.linear_fc2.weight", {"mlp.down_proj.weight": (hidden, ffn)}, "row"),
        )

    def megatron(self, arch: ArchitectureConfig) -> dict[str, Any]:
        from megatron.core.activations import squared_relu

        return {"gated_linear_unit": False, "activation_func": squared_relu}

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        width = 3 * arch.ffn_hidden_size  # up, relu, square
        return PerToken(activation_bytes=element_bytes * width, live_elements=width, moved_elements=width)


FAMILY = Family(
    "arcee", reads=(decoder, squared_relu_mlp, no_attention_bias, no_window), blocks=(Attention(), SquaredReluMlp())
)
