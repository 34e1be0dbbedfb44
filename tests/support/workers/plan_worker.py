"""Build the roles of a configuration, update each role once and measure bytes; see test_plan_measured.py.

Usage (under torchrun): plan_worker.py CASE.json FOUND.json
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from megappo.config import derive_run, load_config, resolve
from megappo.megatron.placed import announce, place
from megappo.megatron.roles import Role, TrainedRole
from megappo.megatron.schedule import PackedBatch
from megappo.ppo.assembly.components import assemble
from megappo.runtime.process import Runtime
from megappo.types import Samples
from tests.support.rewards import without_reward_workers
from tests.support.workers import answer_of_all_ranks


def buffers(chunk: Any) -> list[Any]:
    """Return the gradient buffers of shared parameters and of experts."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


class ForwardMeter:
    """Meter of layers in flight and of distinct storages that forward saves for backward. Weights and the microbatch
    are excluded."""

    def __init__(self, role: TrainedRole) -> None:
        modules = [chunk.module for chunk in role.optimizer.chunks]
        self._excluded = {p.untyped_storage().data_ptr() for m in modules for p in m.parameters()}
        self._excluded |= {b.grad_data.untyped_storage().data_ptr() for c in role.optimizer.chunks for b in buffers(c)}
        self._saved: list[Tensor] = []
        self._storages: dict[int, int] = {}
        self.measuring = True
        self._recomputes = role.model.options.recompute == "full"
        self._layers = self.most_layers = 0
        self._outputs: list[weakref.ref[Tensor]] = []
        self.output_bytes = 0
        for module in modules:
            module.register_forward_pre_hook(self._note_inputs)
            module.register_forward_hook(self._note_output)
            for layer in module.decoder.layers:
                layer.register_forward_pre_hook(self._before)
                layer.register_forward_hook(self._after)

    def _note_inputs(self, _module: Any, inputs: tuple[Tensor, ...]) -> None:
        """Exclude the tokens, which share their storage with the rest of the microbatch."""
        self._excluded.add(inputs[0].untyped_storage().data_ptr())

    def _note_output(self, module: Any, _inputs: Any, output: Tensor) -> None:
        """Record the output of a chunk that sends its output. Freed outputs have one element."""
        if not module.post_process:
            self._outputs.append(weakref.ref(output))
            alive = [o for ref in self._outputs if (o := ref()) is not None and o.numel() > 1]
            self.output_bytes = max(self.output_bytes, sum(o.nbytes for o in alive))

    def _before(self, _layer: Any, _inputs: Any) -> None:
        """Count a layer. With full recomputation, forward runs without gradients, and again in backward with
        gradients."""
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
        """Record a tensor for saved_tensors_hooks."""
        if self.measuring:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._excluded:
                self._storages[storage.data_ptr()] = storage.nbytes()
                self._saved.append(tensor)  # an address must not be reused
        return tensor

    @property
    def saved_bytes(self) -> int:
        """Return the bytes of all recorded storages."""
        return sum(self._storages.values())


class SumOfOutputs:
    """A task that differentiates the sum of the outputs and ends the measurement before backward."""

    def __init__(self, meter: ForwardMeter | None) -> None:
        self._meter = meter

    def __call__(self, head: Any, hidden_t1H: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum."""
        output_N, _ = head(hidden_t1H, batch)
        if self._meter is not None:
            self._meter.measuring = False
        return output_N.sum(), {"loss": output_N.sum().detach(), "count": torch.ones(())}


def samples_of_rank(case: dict[str, Any], runtime: Runtime) -> Samples:
    """Return the samples of this rank, which have equal lengths."""
    count, length = case["samples"], case["sequence_tokens"]
    mine = torch.arange(runtime.rank, count, runtime.world_size)
    sequences = tuple(torch.randint(2, 16, (length,)) for _ in mine)
    return Samples(mine, sequences, torch.full(mine.shape, case["response_tokens"]))


def measure(role: Role, case: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    """Update a role once. Return the bytes of this rank after the update and the saved bytes during the update."""
    batch = place(role, announce(samples_of_rank(case, runtime), runtime.device), [range(case["samples"])])
    if not isinstance(role, TrainedRole):
        batch.update(0, SumOfOutputs(None))
        return {}
    meter = ForwardMeter(role)
    with torch.autograd.graph.saved_tensors_hooks(meter.keep, lambda t: t):
        update = batch.update(0, SumOfOutputs(meter))
    assert update.applied
    parameters = role.parameters()
    return {
        "parameters": sum(p.numel() for p in parameters), "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(b.grad_data.nbytes for chunk in role.optimizer.chunks for b in buffers(chunk)),
        "optimizer": optimizer_bytes(role, parameters), "activations": meter.saved_bytes, "layers": meter.most_layers,
        "outputs": meter.output_bytes, "is_last_stage": role.layout.is_last_stage,
    }  # fmt: skip


def optimizer_bytes(role: TrainedRole, parameters: list[torch.nn.Parameter]) -> int:
    """Return the bytes of moments and of main weights that are separate from the weights."""
    weights = {p.untyped_storage().data_ptr() for p in parameters}
    total = 0
    for part in getattr(role.optimizer.megatron, "chained_optimizers", [role.optimizer.megatron]):
        for main, state in part.optimizer.state.items():
            total += sum(state[name].nbytes for name in ("exp_avg", "exp_avg_sq"))
            total += main.nbytes if main.untyped_storage().data_ptr() not in weights else 0
    return total


def measurements(case: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    config = resolve(load_config(case["config"], case["overrides"]), on_cuda=False)
    with without_reward_workers():
        parts = assemble(config, derive_run(config, runtime.world_size), runtime)
    mine = {name: measure(getattr(parts, name), case, runtime) for name in ("actor", "critic")}
    parts.close()
    return mine


if __name__ == "__main__":
    answer_of_all_ranks(measurements)
