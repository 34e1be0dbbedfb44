"""Tiny Hugging Face models for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 131  # a prime: never divisible, so every tensor parallel size pads


def write_model(folder: Path, family: str, seed: int, noise: float = 0.0, **changes: Any) -> Path:
    """Save a tiny random model of a family with norms and biases that are not trivial.

    `noise` makes a neighbour of the model of the same seed.
    """
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    config = AutoConfig.for_model(family, **(settings | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    for parameter in model.parameters():
        parameter.data.add_(noise * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
