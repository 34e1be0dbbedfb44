"""Adapters for tests: PEFT folders, and transformers models with these adapters.

PEFT itself adds the adapters of dense matrices. transformers stores all experts of a layer in one parameter. For
experts, this file therefore applies the published formula of PEFT, with one pair for each matrix of each expert.
The file does not import megappo.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def write_adapters(
    out: Path, base: Path, *, rank: int, alpha: float, seed: int, targets: tuple[str, ...] = MATRICES,
    b_std: float = 0.05,
) -> Path:  # fmt: skip
    """Write a PEFT folder. The B matrices are not zero, so both factors have gradients in the first step."""
    g = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] in targets:
            rows, columns = weight.shape
            tensors[f"{PREFIX}{stem}.lora_A.weight"] = torch.randn(rank, columns, generator=g) * columns**-0.5
            tensors[f"{PREFIX}{stem}.lora_B.weight"] = torch.randn(rows, rank, generator=g) * b_std
    out.mkdir(parents=True)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config: Any = LoraConfig(r=rank, target_modules=list(targets), task_type="CAUSAL_LM")
    config.lora_alpha = alpha
    config.save_pretrained(out)
    return out


class _OfExperts(nn.Module):
    """Add scale B A to the matrices of all experts. A parameter may contain several matrices, stacked along the
    output dimension. `pairs` contains A and B of each adapted matrix, by its index in the stack."""

    def __init__(self, pairs: dict[int, tuple[Tensor, Tensor]], matrices: int, scale: float) -> None:
        super().__init__()
        self.a = nn.ParameterDict({str(place): a for place, (a, _) in pairs.items()})
        self.b = nn.ParameterDict({str(place): b for place, (_, b) in pairs.items()})
        self.matrices, self.scale = matrices, scale

    def forward(self, weight_EOI: Tensor) -> Tensor:
        blocks = [
            block + self.scale * self.b[str(place)] @ self.a[str(place)] if str(place) in self.a else block
            for place, block in enumerate(weight_EOI.chunk(self.matrices, dim=1))
        ]
        return torch.cat(blocks, dim=1)


def put_adapters(model: Any, folder: Path) -> None:
    """Add the adapters of a PEFT folder to a causal language model and freeze all other weights."""
    config = json.loads((folder / "adapter_config.json").read_text())
    stored = load_file(folder / "adapter_model.safetensors")
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
    dense = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    names = {name.split(".lora_")[0] for name in dense}
    model.requires_grad_(False)
    if dense:
        # Adapters are added layer by layer. For a whole model with expert matrices, PEFT applies `gate_proj` only to
        # the experts.
        for number, layer in enumerate(model.model.layers):
            start = f"model.layers.{number}."
            own = [name.removeprefix(start) for name in names if name.startswith(start)]
            plain = LoraConfig(r=config["r"], lora_alpha=config["lora_alpha"], target_modules=own)
            inject_adapter_in_model(plain, layer)
        placed = {name.replace(".default", ""): p for name, p in model.named_parameters() if ".lora_" in name}
        assert placed.keys() == dense.keys()
        for name, parameter in placed.items():
            parameter.data.copy_(dense[name])
    where, *names_of_matrices = _names_of_experts(model)
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            for parameter, matrices in zip(("gate_up_proj", "down_proj"), names_of_matrices, strict=True):
                experts = layer.mlp.experts
                weight = getattr(experts, parameter)
                stems = [
                    [f"model.layers.{number}.{where}.experts.{e}.{m}" for e in range(len(weight))] for m in matrices
                ]
                pairs: Any = {
                    place: tuple(torch.stack([tensors[f"{s}.lora_{x}.weight"] for s in of_matrix]) for x in "AB")
                    for place, of_matrix in enumerate(stems)
                    if f"{of_matrix[0]}.lora_A.weight" in tensors
                }
                if pairs:
                    adapter = _OfExperts(pairs, len(matrices), config["lora_alpha"] / config["r"])
                    parametrize.register_parametrization(experts, parameter, adapter)
    assert all(
        ("lora_" in name or "parametrizations" in name) == p.requires_grad or "original" in name
        for name, p in model.named_parameters()
    )


def adapters_of(model: Any) -> dict[str, Tensor]:
    """Return the adapters of the model, or of the model that is the trunk of a value model, by PEFT names."""
    adapters: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        name = name.replace("trunk.", "model.")
        if ".lora_" in name:
            adapters[name.replace(".default", "")] = parameter.detach()
        elif ".parametrizations." in name and "original" not in name:
            stem, rest = name.split(".parametrizations.")
            fused, _, letter, place = rest.split(".")
            where, gate_and_up, down = _names_of_experts(model)
            matrix = (gate_and_up if fused == "gate_up_proj" else down)[int(place)]
            for expert, tensor in enumerate(parameter.detach()):
                name = f"{stem.replace('mlp', where)}.{expert}.{matrix}.lora_{letter.upper()}.weight"
                adapters[name] = tensor
    return adapters


def _names_of_experts(model: Any) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the names in files: the container of the experts, the matrices in `gate_up_proj`, and those in
    `down_proj`."""
    if getattr(model, "trunk", model).config.model_type == "mixtral":
        return "block_sparse_moe", ("w1", "w3"), ("w2",)
    return "mlp", ("gate_proj", "up_proj"), ("down_proj",)


def merged_weights(base: Path, model: Any) -> dict[str, Tensor]:
    """Return the weights of a folder with the adapters of a model merged. A critic has a value head instead of an
    output layer."""
    weights, adapters = load_file(base / "model.safetensors"), adapters_of(model)
    scale = _scale(model)
    for name, a in adapters.items():
        if name.endswith(".lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            weights[f"{stem}.weight"] = weights[f"{stem}.weight"] + scale * adapters[f"{stem}.lora_B.weight"] @ a
    head: Mapping[str, Tensor] = {n: p for n, p in model.named_parameters() if n.startswith("head.")}
    if head:
        weights.pop("lm_head.weight", None)
    return {**weights, **head}


def _scale(model: Any) -> float:
    of_experts = (module.scale for module in model.modules() if isinstance(module, _OfExperts))
    scalings = (
        getattr(module, "scaling", None) for module in model.modules()
    )  # attention has a different `scaling` attribute
    return next((float(s["default"]) for s in scalings if isinstance(s, dict)), 0.0) or next(of_experts)
