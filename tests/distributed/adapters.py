"""Adapters for tests: PEFT folders, and models of transformers that have them.

PEFT itself puts them on dense matrices. transformers keeps all experts of a layer in one parameter, where they stand as
PEFT's published formula has them, one pair for each matrix of each expert. Imports nothing of megappo.
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
    out: Path, base: Path, *, rank: int, alpha: float, seed: int, targets: tuple[str, ...] = MATRICES
) -> Path:
    """A folder as PEFT writes it, whose B are not zero, so that both factors have a gradient at once."""
    g = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] in targets:
            rows, columns = weight.shape
            tensors[f"{PREFIX}{stem}.lora_A.weight"] = torch.randn(rank, columns, generator=g) * columns**-0.5
            tensors[f"{PREFIX}{stem}.lora_B.weight"] = torch.randn(rows, rank, generator=g) * 0.05
    out.mkdir(parents=True)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config: Any = LoraConfig(r=rank, target_modules=list(targets), task_type="CAUSAL_LM")
    config.lora_alpha = alpha
    config.save_pretrained(out)
    return out


class _OfExperts(nn.Module):
    """Adds scale B A to the matrices of all experts, which stand one below the other where there are several."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]], scale: float) -> None:
        super().__init__()
        self.a = nn.ParameterList(a for a, _ in pairs)
        self.b = nn.ParameterList(b for _, b in pairs)
        self.scale = scale

    def forward(self, weight_EOI: Tensor) -> Tensor:
        return weight_EOI + self.scale * torch.cat([b @ a for a, b in zip(self.a, self.b, strict=True)], dim=1)


def put_adapters(model: Any, folder: Path) -> None:
    """Have a causal language model train the adapters of a PEFT folder and nothing else."""
    config = json.loads((folder / "adapter_config.json").read_text())
    stored = load_file(folder / "adapter_model.safetensors")
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
    dense = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    names = {name.split(".lora_")[0] for name in dense}
    model.requires_grad_(False)
    if dense:
        # Layer by layer: of a whole model PEFT takes `gate_proj` for the experts' alone where they have such matrices.
        for number, layer in enumerate(model.model.layers):
            start = f"model.layers.{number}."
            own = [name.removeprefix(start) for name in names if name.startswith(start)]
            plain = LoraConfig(r=config["r"], lora_alpha=config["lora_alpha"], target_modules=own)
            inject_adapter_in_model(plain, layer)
        placed = {name.replace(".default", ""): p for name, p in model.named_parameters() if ".lora_" in name}
        assert placed.keys() == dense.keys()
        for name, parameter in placed.items():
            parameter.data.copy_(dense[name])
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            for parameter, matrices in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                experts = layer.mlp.experts
                weight = getattr(experts, parameter)
                stems = [[f"model.layers.{number}.mlp.experts.{e}.{m}" for e in range(len(weight))] for m in matrices]
                pairs = [
                    tuple(torch.stack([tensors[f"{s}.lora_{x}.weight"] for s in of_matrix]) for x in "AB")
                    for of_matrix in stems
                ]
                adapter = _OfExperts(pairs, config["lora_alpha"] / config["r"])  # type: ignore[arg-type]
                parametrize.register_parametrization(experts, parameter, adapter)
    assert all(
        ("lora_" in name or "parametrizations" in name) == p.requires_grad or "original" in name
        for name, p in model.named_parameters()
    )


def adapters_of(model: Any) -> dict[str, Tensor]:
    """The adapters of such a model, or of one that has it as its trunk, by PEFT's names."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        name = name.replace("trunk.", "model.")
        if ".lora_" in name:
            found[name.replace(".default", "")] = parameter.detach()
        elif ".parametrizations." in name and "original" not in name:
            stem, rest = name.split(".parametrizations.")
            fused, _, letter, place = rest.split(".")
            matrix = ("gate_proj", "up_proj")[int(place)] if fused == "gate_up_proj" else fused
            for expert, tensor in enumerate(parameter.detach()):
                found[f"{stem}.{expert}.{matrix}.lora_{letter.upper()}.weight"] = tensor
    return found


def merged_weights(base: Path, model: Any) -> dict[str, Tensor]:
    """The weights in a folder with a model's adapters added; a critic has no output layer, and a head."""
    weights, found = load_file(base / "model.safetensors"), adapters_of(model)
    scale = _scale(model)
    for name, a in found.items():
        if name.endswith(".lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            weights[f"{stem}.weight"] = weights[f"{stem}.weight"] + scale * found[f"{stem}.lora_B.weight"] @ a
    head: Mapping[str, Tensor] = {n: p for n, p in model.named_parameters() if n.startswith("head.")}
    if head:
        weights.pop("lm_head.weight", None)
    return {**weights, **head}


def _scale(model: Any) -> float:
    of_experts = (module.scale for module in model.modules() if isinstance(module, _OfExperts))
    scalings = (getattr(module, "scaling", None) for module in model.modules())  # attention has one of its own
    return next((float(s["default"]) for s in scalings if isinstance(s, dict)), 0.0) or next(of_experts)
