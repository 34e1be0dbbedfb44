"""Compute with the adapters of PEFT folders and compare with transformers; see test_lora.py.

Usage (under torchrun): adapters_worker.py CASE.json FOUND.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megappo.config.grid import Grid
from megappo.families.adapters import LoraShape
from megappo.families.flops import SampleCost
from megappo.families.parameters import pieces
from megappo.families.weights import scatter_shard
from megappo.megatron.build import BuildOptions, RoleModel, build_model
from megappo.megatron.layout import Cut, Layout, make_layouts
from megappo.megatron.roles import LocalRole, Placement
from megappo.models.model_files import read_architecture
from megappo.reshard.peft import MergedSource, PeftSource
from megappo.reshard.sources import SafetensorsSource
from megappo.reshard.stream import WeightStream
from megappo.runtime.process import Runtime
from tests.support.adapters import adapters_of, merged_weights, put_adapters
from tests.support.workers import answer
from tests.support.workers.model_worker import forward, sequences

RATE = 1e-5
"""Learning rate of the gradient step, after which all comparisons are repeated."""


class Reference:
    """The same model in transformers and PEFT, in float64."""

    def __init__(self, folder: Path, adapters: Path, tokens: list[Tensor]) -> None:
        exact: Any = {"dtype": torch.float64, "experts_implementation": "eager", "attn_implementation": "eager"}
        self._folder, self._tokens = folder, tokens
        self._model = AutoModelForCausalLM.from_pretrained(folder, **exact).eval()
        put_adapters(self._model, adapters)
        self._model.double()
        self._trained = [p for p in self._model.parameters() if p.requires_grad]

    def logp(self) -> Tensor:
        """Return (N, 1) log-probabilities of every token except the first."""
        rows = []
        for sequence in self._tokens:
            logp = self._model(sequence[None]).logits[0, :-1].log_softmax(-1)
            rows.append(logp.gather(1, sequence[1:, None]))
        return torch.cat(rows)

    def merged(self) -> dict[str, Tensor]:
        """Return the complete weights with the adapters merged."""
        return {name: tensor.double() for name, tensor in merged_weights(self._folder, self._model).items()}

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the sum of log-probabilities by PEFT names, and take a step of gradient ascent."""
        self.logp().sum().backward()
        weights = [parameter.data for parameter in self._trained]
        for parameter in self._trained:
            assert parameter.grad is not None
            parameter.data = parameter.grad
        gradients_of = {name: tensor.clone() for name, tensor in adapters_of(self._model).items()}
        for parameter, weight in zip(self._trained, weights, strict=True):
            assert parameter.grad is not None
            parameter.data = weight + RATE * parameter.grad
        return gradients_of


def take_step(model: RoleModel) -> dict[str, Tensor]:
    """Return the gradients of the adapters by PEFT names and take a step along them. One rank has all adapters."""
    gradients: dict[str, Tensor] = {}
    for adapter in model.local_adapters():
        gradient = adapter.parameter.grad
        assert gradient is not None
        for name, shape in adapter.entry.tensors.items():
            gradients.setdefault(name, torch.full(shape, float("nan")))
        place = (0, 1, model.options.padded_vocab)
        scatter_shard(adapter.part_of(gradient), pieces(model.arch, adapter.entry, *place), gradients)
        adapter.shard.add_(adapter.part_of(gradient), alpha=RATE)
    return gradients


def furthest(mine: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Return the largest relative error of a tensor norm."""
    assert mine.keys() == truth.keys(), mine.keys() ^ truth.keys()
    return max(float((mine[n].double() - t).norm() / t.norm().clamp(min=1e-12)) for n, t in truth.items())


def check(folder: Path, adapters: Path, layout: Layout, runtime: Runtime) -> dict[str, float]:
    """Return the errors of a model with these adapters."""
    arch, peft_config = read_architecture(folder), json.loads((adapters / "adapter_config.json").read_text())
    lora = LoraShape.of(arch, peft_config["r"], peft_config["lora_alpha"], peft_config["target_modules"])
    base, source = SafetensorsSource(folder, arch), PeftSource(adapters, arch, lora)
    options = BuildOptions(torch.float32, runtime.device, arch.vocab_size, lora=lora)
    tokens = sequences(arch.vocab_size)
    truth = Reference(folder, adapters, tokens)
    placement = Placement("actor", layout.grid, budget_tokens=1, microbatch_multiple=1, cost=SampleCost(1, 0))
    model = build_model(arch, layout, options, base, source)
    stream = WeightStream(LocalRole(placement, model, runtime), 1 << 30)
    exported = dict(MergedSource(arch, lora, base, source, is_critic=False, dtype=torch.float32).tensors())
    plain = load_file(folder / "model.safetensors")
    merged, before = truth.merged(), truth.logp()
    errors = {
        "moved": furthest(plain, merged),
        "exported": furthest(exported, merged),
        "streamed": furthest(dict(stream), merged),
        "logp": apart(forward(model, layout, tokens, train=True), before),
        "gradients": furthest(take_step(model), truth.gradients()),
    }
    after = truth.logp()
    errors["streamed after a step"] = furthest(dict(stream), truth.merged())
    errors["logp after a step"] = apart(forward(model, layout, tokens, train=False), after)
    errors["stepped"] = apart(after, before)
    return errors


def apart(mine: Tensor | None, truth: Tensor) -> float:
    """Return the largest difference in nats."""
    assert mine is not None
    return float((mine - truth.detach()).abs().max())


def errors_of(case: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    layout = make_layouts({"actor": Cut(Grid((0,), 1, 1), 1, False)}, "cpu", 120)["actor"]
    assert isinstance(layout, Layout)
    folder = Path(case["folder"])
    return {name: check(folder, Path(path), layout, runtime) for name, path in case["adapters"].items()}


if __name__ == "__main__":
    answer(errors_of)
