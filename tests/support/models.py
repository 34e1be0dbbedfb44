"""Tiny Hugging Face models for tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "full_attention_interval": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    # Queries and keys are normalized to unit length, and the output of the attention is normalized. Both enlarge
    # rounding errors of small numbers. With the usual values, float32 results of transformers differ from float64 by
    # 1e-4 nats.
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-3,
}
SHARED = {**EXPERTS, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 20}
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    # Logit caps in the range of the logits, and scores that are not divided by the square root of the head size.
    "gemma2": {
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 5, "sliding_window": 7,
    },
    "gemma3_text": {"query_pre_attn_scalar": 5, "sliding_window": 7, "sliding_window_pattern": 2},
    # Heads of size 8 with a window, and heads of size 16 without a window, of which a quarter is rotated.
    "gemma4_text": {
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_key_value_heads": 4,
        "num_global_key_value_heads": 2, "global_head_dim": 16, "final_logit_softcapping": 5.0, "sliding_window": 7,
    },
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
        "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "attention_bias": True,
        "use_qk_norm": True,
    },
    # Values are narrower than queries. Each token uses two of four groups of experts. YaRN changes the attention.
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "v_head_dim": 9,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
            "mscale": 1.0, "mscale_all_dim": 0.7,
        },
    },
    "qwen3_next": {**DELTA, **SHARED},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **SHARED},
    # Clamps in the range of the activations, some layers with a window, and the published RoPE settings.
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "swiglu_alpha": 1.3,
        "swiglu_limit": 0.6,
        "sliding_window": 7,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 32,
        },
    },
    "mixtral": {"num_local_experts": EXPERTS["num_experts"], "num_experts_per_tok": EXPERTS["num_experts_per_tok"]},
}  # fmt: skip
"""Settings of a tiny model of a family, in addition to the common sizes."""
VOCAB = 131  # a prime, so every tensor parallel size pads the vocabulary


def write_model(folder: Path, family: str, seed: int, noise: float = 0.0, **changes: Any) -> Path:
    """Save a tiny random model of a family with norms and biases that are not trivial.

    `noise` adds random numbers to the weights of the model with the same seed.
    """
    settings: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "vocab_size": VOCAB, "max_position_embeddings": 128, "initializer_range": 0.15,
        "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
    }  # fmt: skip
    settings |= OWN.get(family, {})
    config = AutoConfig.for_model(family, **(settings | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    buffers = (b for b in model.named_buffers() if b[0].endswith(("bias", "layer_scalar")))
    for name, parameter in (*model.named_parameters(), *buffers):
        if parameter.dim() == 1 or name.endswith("bias"):  # gpt-oss stores the biases of all experts in one tensor
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    for parameter in model.parameters():
        parameter.data.add_(noise * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def add_mtp_layers(folder: Path) -> dict[str, Tensor]:
    """Add a multi-token prediction layer to a folder, in the published format and in float32. The layer is similar to
    the last layer and has other weights. Return its tensors."""
    path = folder / "model.safetensors"
    tensors, content = load_file(path), json.loads((folder / "config.json").read_text())
    last, hidden = f"model.layers.{content['num_hidden_layers'] - 1}.", content["hidden_size"]
    if content["model_type"] in ("glm4_moe", "deepseek_v3"):
        stem = begin = f"model.layers.{content['num_hidden_layers']}."
        extra_shapes = {
            "enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "shared_head.norm": (hidden,),
        }  # fmt: skip
        extra_shapes |= dict.fromkeys(("embed_tokens", "shared_head.head"), (content["vocab_size"], hidden))
    else:
        stem, begin = "mtp.", "mtp.layers.0."
        extra_shapes = {"fc": (hidden, 2 * hidden)}
        extra_shapes |= dict.fromkeys(("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"), (hidden,))
    shapes = {name.replace(last, begin): tuple(tensor.shape) for name, tensor in tensors.items() if last in name}
    shapes |= {f"{stem}{name}.weight": shape for name, shape in extra_shapes.items()}
    generator = torch.Generator().manual_seed(7)
    layer_tensors = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors | layer_tensors, path, metadata={"format": "pt"})
    return layer_tensors


def write_value_model(
    folder: Path, family: str, seed: int, head: str = "score", bias: float | None = 0.5, **changes: Any
) -> Path:
    """Save a tiny model with one value per token. The head has the name of one of several programs. The folder also
    contains the files of a causal language model of the family."""
    write_model(folder, family, seed, **changes)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    hidden = tensors["model.norm.weight"].shape[0]
    tensors[f"{head}.weight"] = torch.randn(1, hidden, generator=generator)
    if bias is not None:
        tensors[f"{head}.bias"] = torch.tensor([bias])
    tensors["model.embed_tokens.weight"][0] = 0.1  # transformers draws no numbers for the row of the padding token
    if head == "score":  # folders of transformers have no other head
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def stored_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters of a transformers model by their names in files, with separate tensors for each expert."""
    stored_names = model.state_dict().keys()
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    parameters |= {name: buffer for name, buffer in model.named_buffers() if name in stored_names}
    yield from expert_by_expert(revert_weight_conversion(model, parameters))


def expert_by_expert(stored: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of files. Tensors of gpt-oss for all experts of a layer are split by expert."""
    for name, tensor in stored.items():
        layer, _, last = name.rpartition(".experts.")
        if not layer or last.removesuffix("_bias") not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        kind = "bias" if last.endswith("_bias") else "weight"
        for expert, own in enumerate(tensor):
            place, rows = f"{layer}.experts.{expert}", own if kind == "bias" else own.T
            if last.startswith("down"):
                yield f"{place}.down_proj.{kind}", rows
            else:
                yield f"{place}.gate_proj.{kind}", rows[0::2]
                yield f"{place}.up_proj.{kind}", rows[1::2]


def quantise(folder: Path, out: Path, blocks: tuple[int, int], **config: Any) -> dict[str, Tensor]:
    """Write the folder of a model in the float8 format of Qwen and DeepSeek: matrices of layers in float8 e4m3 with a
    scale per block, in separate files, and all other tensors unchanged. Return the plain tensors in float64."""
    out.mkdir()
    content = json.loads((folder / "config.json").read_text())
    quantization = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(blocks),
    }  # fmt: skip
    content["quantization_config"] = quantization | config
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
