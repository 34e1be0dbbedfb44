"""Add up gradients of several microbatches in the buffer of Megatron and in float64; see test_gradients.py.

Usage (under torchrun): gradients_worker.py CASE.json FOUND.json
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.config.grid import Grid
from megappo.config.role_models import load_architecture
from megappo.config.schema import ModelSettings
from megappo.config.sections.roles import OptimizerSettings
from megappo.families.architecture import padded_vocab_size
from megappo.megatron.build import BuildOptions, build_model
from megappo.megatron.layout import Cut, Layout, make_layouts
from megappo.megatron.optimizer.optimization import RoleOptimizer
from megappo.megatron.schedule import PlacedSample, pack_samples, run_schedule
from megappo.reshard.sources import SafetensorsSource
from megappo.runtime.process import Runtime
from tests.support.workers import answer
from tests.support.workers.model_worker import outputs, sequences


def relative(measured: Tensor, truth: Tensor) -> float:
    return float((measured.double() - truth).norm() / truth.norm())


def check(case: dict[str, Any], runtime: Runtime) -> dict[str, list[float]]:
    """Return for each parameter the relative error of its sum to float64, and the error of a sum in bfloat16."""
    folder = Path(case["folder"])
    arch = load_architecture(folder, ModelSettings(path=str(folder)))
    layout = make_layouts({"actor": Cut(Grid(tuple(range(runtime.world_size)), 1, 1), 1, False)}, "cpu", 120)["actor"]
    assert isinstance(layout, Layout)
    options = BuildOptions(torch.bfloat16, runtime.device, padded_vocab_size(arch.vocab_size, 1, 8))
    settings = OptimizerSettings(learning_rate=1e-3, overlap_grad_reduce=case["overlap"], distributed=False)
    gradients: dict[str, list[Tensor]] = defaultdict(list)
    optimizer = RoleOptimizer(build_model(arch, layout, options, SafetensorsSource(folder, arch)), settings, 10)
    parameters = dict(optimizer.chunks[0].module.named_parameters())
    for name, parameter in parameters.items():
        parameter.register_hook(partial(lambda name, gradient: gradients[name].append(gradient.clone()), name))
    tokens = [s for s in sequences(arch.vocab_size) for _ in range(3)][runtime.rank :: runtime.world_size]
    batches = [pack_samples([PlacedSample(i, s, len(s) - 1)], runtime.device) for i, s in enumerate(tokens)]
    optimizer.zero_grad()
    run_schedule(optimizer.chunks, layout, batches, outputs, train=True)
    of_all: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(of_all, dict(gradients))
    errors = {}
    for name in gradients:
        parts = [part for of_rank in of_all for part in of_rank[name]]
        truth, narrow = sum(part.double() for part in parts), sum(parts)
        errors[name] = [relative(parameters[name].main_grad, truth), relative(narrow, truth)]
        assert {part.dtype for part in parts} == {torch.bfloat16}
    assert errors.keys() == parameters.keys()
    return errors


if __name__ == "__main__":
    answer(check)
