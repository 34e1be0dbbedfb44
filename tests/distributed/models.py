"""Tiny Hugging Face models for tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    # Caps that are felt, and scores that are not divided by the root of a head's size.
    "gemma2": {
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 5,
        "sliding_window": 7,
    },
    "gemma3_text": {"query_pre_attn_scalar": 5, "sliding_window": 7, "sliding_window_pattern": 2},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "mixtral": {"num_local_experts": EXPERTS["num_experts"], "num_experts_per_tok": EXPERTS["num_experts_per_tok"]},
}
"""What a tiny model of a family has beside the sizes of all."""
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
    settings |= OWN.get(family, {})
    config = AutoConfig.for_model(family, **(settings | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in (*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith("bias"))):
        if parameter.dim() == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    for parameter in model.parameters():
        parameter.data.add_(noise * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def write_value_model(
    folder: Path, family: str, seed: int, head: str = "score", bias: float | None = 0.5, **changes: Any
) -> Path:
    """Save a tiny model with one value per token, its head under a name that some program gives it, in a folder of
    the same family with a language model head."""
    write_model(folder, family, seed, **changes)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    hidden = tensors["model.norm.weight"].shape[0]
    tensors[f"{head}.weight"] = torch.randn(1, hidden, generator=generator)
    if bias is not None:
        tensors[f"{head}.bias"] = torch.tensor([bias])
    tensors["model.embed_tokens.weight"][0] = 0.1  # transformers draws no row for the padding token
    if head == "score":  # transformers' own folders have no other head
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def stored_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """A transformers model's parameters by the names they have in files, where every expert has its own."""
    kept = model.state_dict().keys()
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    parameters |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
    yield from revert_weight_conversion(model, parameters).items()


def quantise(folder: Path, out: Path, blocks: tuple[int, int], **config: Any) -> dict[str, Tensor]:
    """Write a model's folder as Qwen's and DeepSeek's float8 folders are: matrices of the layers in float8 e4m3 with a
    scale for each block, in files of their own, everything else as it was. Returns the plain tensors, in float64."""
    out.mkdir()
    content = json.loads((folder / "config.json").read_text())
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(blocks)}
    content["quantization_config"] = said | config
    (out / "config.json").write_text(json.dumps(content))
    files: dict[str, dict[str, Tensor]] = {
        "model-00001-of-00002.safetensors": {},
        "model-00002-of-00002.safetensors": {},
    }
    weights, scales = files.values()
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() != 2 or "layers" not in name or name.endswith("mlp.gate.weight"):
            weights[name], plain[name] = tensor, tensor.double()
            continue
        rows, columns = tensor.shape
        largest = torch.tensor(
            [[float(part.abs().max()) for part in band.split(blocks[1], 1)] for band in tensor.split(blocks[0])]
        )
        scales[f"{name}_scale_inv"] = scale = largest / 448
        spread = scale.double().repeat_interleave(blocks[0], 0)[:rows].repeat_interleave(blocks[1], 1)[:, :columns]
        weights[name] = (tensor / spread).to(torch.float8_e4m3fn)
        plain[name] = weights[name].double() * spread
    for file, tensors in files.items():
        save_file(tensors, out / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return plain
