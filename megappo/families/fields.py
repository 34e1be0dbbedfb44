"""Types of transformers' configurations, and of the settings that families derive from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

HFConfig: TypeAlias = Any
"""transformers' configuration of a model. Each family has a different class with different settings."""
Fields: TypeAlias = dict[str, Any]
"""Fields of ArchitectureConfig by name."""
MegatronSettings: TypeAlias = dict[str, Any]
"""Fields of Megatron's TransformerConfig by name."""
Activation: TypeAlias = Callable[..., Any]
"""Activation function of an MLP, from torch."""
