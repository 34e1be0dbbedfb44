"""Types of what families read of a model's configuration, and of what they tell Megatron."""

from __future__ import annotations

from typing import Any, TypeAlias

HFConfig: TypeAlias = Any
"""transformers' configuration of a model. Its class, and so its settings, are another one for each family."""
Fields: TypeAlias = dict[str, Any]
"""Fields of ArchitectureConfig by name."""
MegatronSettings: TypeAlias = dict[str, Any]
"""Fields of Megatron's TransformerConfig by name."""
