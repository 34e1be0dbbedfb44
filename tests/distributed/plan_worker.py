"""Builds the roles of configurations, updates each once and measures bytes; see test_plan_measured.py.

Usage (under torchrun): plan_worker.py CASES.json OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.harness import own_groups
from megappo.assembly import assemble
from megappo.config import derive_run, load_config
from megappo.config.schema import RuntimeSettings
from megappo.models.roles import TrainedRole
from megappo.models.schedule import PackedBatch
from megappo.runtime import Runtime, start_runtime
from megappo.runtime.exchange import Row


def buffers(chunk: Any) -> list[Any]:
    """Gradient buffers of what every token passes, and those of experts."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


class ForwardMeter:
    """Bytes of distinct storages that forward keeps for backward, weights left out, and layers in flight."""

    def __init__(self, role: TrainedRole) -> None:
        modules = [chunk.module for chunk in role._trainer.chunks]
        self._weights = {p.untyped_storage().data_ptr() for m in modules for p in m.parameters()}
        self._weights |= {b.grad_data.untyped_storage().data_ptr() for c in role._trainer.chunks for b in buffers(c)}
        self._kept: list[Tensor] = []
        self._storages: dict[int, int] = {}
        self.measuring = True
        self._recomputes = role.model.options.recompute == "full"
        self._layers = self.most_layers = 0
        for module in modules:
            for layer in module.decoder.layers:
                layer.register_forward_pre_hook(self._before)
                layer.register_forward_hook(self._after)

    def _before(self, _layer: Any, _inputs: Any) -> None:
        """Under full recomputation forward runs without gradients, and a second time in backward with them."""
        if self._recomputes:
            self._count(-1 if torch.is_grad_enabled() else 1)

    def _after(self, _layer: Any, _inputs: Any, outputs: Any) -> None:
        if not self._recomputes:
            self._count(1)
            outputs[0].register_hook(lambda _gradient: self._count(-1))

    def _count(self, change: int) -> None:
        self._layers += change
        self.most_layers = max(self.most_layers, self._layers)
        self.measuring = self.measuring and change > 0

    def keep(self, tensor: Tensor) -> Tensor:
        """For saved_tensors_hooks."""
        if self.measuring:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._weights:
                self._storages[storage.data_ptr()] = storage.nbytes()
                self._kept.append(tensor)  # an address must not be used twice
        return tensor

    @property
    def kept_bytes(self) -> int:
        """All storages seen while measuring."""
        return sum(self._storages.values())


class SumOfOutputs:
    """Differentiates what the output layer says, and ends the measurement where backward may begin."""

    def __init__(self, meter: ForwardMeter | None) -> None:
        self._meter = meter

    def expect(self, head: Any, batch: PackedBatch) -> None:
        """Name the rows and the tokens they predict."""
        head.expect(batch.rows_N, batch.labels_N)

    def finish(self, output: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum."""
        if self._meter is not None:
            self._meter.measuring = False
        return output.sum(), {"loss": output.sum().detach(), "count": torch.ones(())}


def rows_of_rank(case: dict[str, Any], runtime: Runtime) -> list[Row]:
    """This rank's share of samples of equal length."""
    count, length = case["samples"], case["sequence_tokens"]
    mine = range(runtime.rank, count, runtime.world_size)
    return [Row(i, torch.randint(2, 16, (length,)), torch.zeros(1, case["response_tokens"])) for i in mine]


def measure(role: TrainedRole, case: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    """One update of a role; what this rank holds after it and kept during it."""
    meter = ForwardMeter(role) if role.model is not None else None

    task = SumOfOutputs(meter)
    if meter is None:
        role.update_minibatch(rows_of_rank(case, runtime), task)
        return {}
    with torch.autograd.graph.saved_tensors_hooks(meter.keep, lambda t: t):
        update = role.update_minibatch(rows_of_rank(case, runtime), task)
    assert update is not None and update.applied
    parameters = [p for chunk in role.model.chunks for p in chunk.parameters()]
    return {
        "parameters": sum(p.numel() for p in parameters),
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(b.grad_data.nbytes for chunk in role._trainer.chunks for b in buffers(chunk)),
        "optimizer": optimizer_bytes(role, parameters),
        "activations": meter.kept_bytes,
        "layers": meter.most_layers,
        "is_last_stage": role.placement.layout.is_last_stage,
    }


def optimizer_bytes(role: TrainedRole, parameters: list[torch.nn.Parameter]) -> int:
    """Moments, and main weights where they are not the weights themselves."""
    weights = {p.untyped_storage().data_ptr() for p in parameters}
    total = 0
    for part in getattr(role._trainer._optimizer, "chained_optimizers", [role._trainer._optimizer]):
        for main, state in part.optimizer.state.items():
            total += sum(state[name].nbytes for name in ("exp_avg", "exp_avg_sq"))
            total += main.nbytes if main.untyped_storage().data_ptr() not in weights else 0
    return total


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    results: dict[str, Any] = {}
    with start_runtime(RuntimeSettings(collective_timeout_seconds=120)) as runtime:
        for case in cases:
            config = load_config(case["config"], case["overrides"])
            gathered: list[Any] = [None] * runtime.world_size
            with own_groups():
                parts = assemble(config, derive_run(config, runtime.world_size), runtime)
                mine = {name: measure(getattr(parts, name), case, runtime) for name in ("actor", "critic")}
                dist.all_gather_object(gathered, mine)
                parts.close()
            results[case["name"]] = gathered
        if runtime.is_main:
            Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
