"""Actor, critic and reference: models on their layouts. Each role has an object on every rank of the world.

A rank without a part of a role's model has an `AbsentRole`, so all ranks call the same methods. `place` sends samples
to the ranks of a role (see `placed`). This module computes with the samples on a rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megappo.config.grid import Grid
from megappo.families.declaration import ArchitectureConfig
from megappo.families.flops import SampleCost
from megappo.megatron.build import BuildOptions, RoleModel
from megappo.megatron.context import whole_output
from megappo.megatron.heads import LogprobHead, ValueHead
from megappo.megatron.layers.lora import merged
from megappo.megatron.layers.router import EXTRA_COUNTS, summed_losses, summed_reports
from megappo.megatron.layout import Layout, Outside
from megappo.megatron.local_shards import LocalShard
from megappo.megatron.optimizer.offload import RoleStorage, RoleTensors
from megappo.megatron.optimizer.optimization import RoleOptimizer
from megappo.megatron.packing import MicrobatchPlan
from megappo.megatron.schedule import Chunk, Head, PackedBatch, PlacedSample, Task, pack_samples, run_schedule
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import all_gather_objects
from megappo_kernels.metrics import combine, stacked


@dataclass(frozen=True)
class Placement:
    """Layout of a role, available on every rank."""

    name: str
    grid: Grid
    budget_tokens: int
    microbatch_multiple: int
    """Divisor of the number of a replica's microbatches: the pipeline size with an interleaved pipeline,
    otherwise 1."""
    cost: SampleCost
    """Cost model for the distribution of samples over replicas and microbatches."""
    stage_layers: tuple[tuple[int, ...], ...] = ()
    """Numbers of the layers of each pipeline stage, in the order of its chunks."""


class Role(ABC):
    """Role on one rank of the world, which has a part of the model or no part."""

    def __init__(self, placement: Placement, arch: ArchitectureConfig, options: BuildOptions, runtime: Runtime) -> None:
        self.placement, self.arch, self.options, self.runtime = placement, arch, options, runtime

    @property
    @abstractmethod
    def layout(self) -> Layout | Outside:
        """Place of this rank in the role's grid, or `Outside`."""

    @abstractmethod
    def run_forward(self, plan: MicrobatchPlan, samples: Mapping[int, PlacedSample]) -> dict[int, Tensor]:
        """Compute the output (R,) float32 at the response tokens of each sample. The result is empty on ranks that do
        not return results."""

    def routing_report(self) -> Tensor:
        """Return (layers, experts + 2) int64 in host memory: the counts of `RouterChoice` over this rank's tokens of
        the last forward pass. Layers on other ranks have counts of 0."""
        return torch.zeros(self.arch.layers, self.arch.experts + EXTRA_COUNTS, dtype=torch.int64)

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank's part of the model."""

    @abstractmethod
    def rest(self) -> None:
        """End the use of the role: wait for pending weights after an update, and offload the tensors that the settings
        select (see `megappo.megatron.optimizer.offload`)."""

    @abstractmethod
    def wake(self) -> None:
        """Load the whole role onto the device before a change. `run_forward` and `run_update` load the role
        themselves."""

    @abstractmethod
    def read(self, parameter: nn.Parameter) -> Tensor:
        """Return the weights of a parameter on the device, read-only, from any storage location."""

    @abstractmethod
    def read_shard(self, shard: LocalShard) -> Tensor:
        """Return the weights of a shard on the device, read-only, including its adapters."""

    @abstractmethod
    def mapped_parameters(self) -> list[LocalShard]:
        """Return the shards of the map on this rank (see `RoleModel.local_parameters`)."""

    @abstractmethod
    def trained_parameters(self) -> list[LocalShard]:
        """Return the shards that are trained on this rank (see `RoleModel.local_trained`)."""

    def copy_weights(self) -> list[Tensor]:
        """Copy this rank's trained parameters to host memory."""
        return [self.read(p).to("cpu", copy=True) for p in self._changing()]

    def _changing(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    @torch.no_grad()
    def exchange_weights(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Replace the weights of the model with the weights of an earlier `copy_weights`. Return a copy of the
        replaced weights."""
        before = self.copy_weights()
        self.wake()
        for parameter, tensor in zip(self._changing(), weights, strict=True):
            parameter.copy_(tensor)
        self.rest()
        return before

    @torch.no_grad()
    def take_weights(self, other: Role) -> None:
        """Copy the weights of a role with the same model on the same layout."""
        self.wake()
        for own, theirs in zip(self.parameters(), other.parameters(), strict=True):
            own.copy_(other.read(theirs))
        self.rest()


class AbsentRole(Role):
    """Role on a rank that has no part of the model. The rank sends samples and receives results."""

    layout = Outside()

    def run_forward(self, plan: MicrobatchPlan, samples: Mapping[int, PlacedSample]) -> dict[int, Tensor]:
        return {}

    def parameters(self) -> list[nn.Parameter]:
        return []

    def rest(self) -> None:
        return None

    def wake(self) -> None:
        return None

    def read(self, parameter: nn.Parameter) -> Tensor:
        raise AssertionError(f"{self.placement.name} has no weights on this rank")

    def read_shard(self, shard: LocalShard) -> Tensor:
        return self.read(shard.parameter)

    def mapped_parameters(self) -> list[LocalShard]:
        return []

    def trained_parameters(self) -> list[LocalShard]:
        return []


class LocalRole(Role):
    """Role on one of its ranks."""

    def __init__(self, placement: Placement, model: RoleModel, runtime: Runtime) -> None:
        super().__init__(placement, model.arch, model.options, runtime)
        self.model = model
        self._chunks: Sequence[Chunk] = model.chunks
        self._report: Tensor | None = None
        self.storage = RoleStorage(model.options, self._tensors())
        """Storage that moves the role's tensors to and from the device."""

    def _tensors(self) -> RoleTensors:
        return RoleTensors(weights=lambda: [p for chunk in self.model.chunks for p in chunk.parameters()])

    @property
    def layout(self) -> Layout:
        """Layout of the role (see `Role.layout`)."""
        return self.model.layout

    def parameters(self) -> list[nn.Parameter]:
        return [p for chunk in self.model.chunks for p in chunk.parameters()]

    def rest(self) -> None:
        self.storage.rest()

    def wake(self) -> None:
        self.storage.bring_all()
        self.storage.await_optimizer()

    def read(self, parameter: nn.Parameter) -> Tensor:
        return self.storage.read(parameter).view(parameter.shape)

    def read_shard(self, shard: LocalShard) -> Tensor:
        adapter, shape = self.model.adapter_of.get(shard.entry.megatron), self.options.lora
        if adapter is None or shape is None:
            return self._stored(shard)
        a, b = self._stored(adapter.a), self._stored(adapter.b)
        return merged(self._stored(shard), a, b, shape.scale, adapter.order)

    def _stored(self, shard: LocalShard) -> Tensor:
        return self.storage.read(shard.parameter, shard.elements).view(shard.shape)

    def mapped_parameters(self) -> list[LocalShard]:
        return self.model.local_parameters()

    def trained_parameters(self) -> list[LocalShard]:
        return self.model.local_trained()

    def run_forward(self, plan: MicrobatchPlan, samples: Mapping[int, PlacedSample]) -> dict[int, Tensor]:
        batches = self._packed(plan, samples)
        self.storage.bring_weights()
        outputs = run_schedule(self._chunks, self.layout, batches, _outputs, train=False)
        self._report = summed_reports(batch.segments.routing for batch in batches)
        if self.layout.grid.cp > 1 and self.layout.reports_losses:
            outputs = [
                whole_output(output_N, batch.own_N, sum(batch.response_lengths), self.layout.groups.cp)
                for batch, output_N in zip(batches, outputs, strict=True)
            ]
        if not self.layout.hands_out_results:
            return {}
        return {
            sample_id: piece_R
            for batch, output_W in zip(batches, outputs, strict=True)
            if not batch.is_filler
            for sample_id, piece_R in zip(batch.sample_ids, output_W.split(batch.response_lengths), strict=True)
        }

    def routing_report(self) -> Tensor:
        report = super().routing_report()
        if self._report is not None:
            local_layers = [n for n in self.placement.stage_layers[self.layout.stage] if n in self.arch.expert_layers]
            report[local_layers] = self._report.cpu()
        return report

    def _packed(
        self, plan: MicrobatchPlan, samples: Mapping[int, PlacedSample], *, balance: float = 0.0
    ) -> list[PackedBatch]:
        """Pack the microbatches of this rank's replica. `balance` is an argument of `pack_samples`."""
        if not self.options.replays_routing and any(sample.routing is not None for sample in samples.values()):
            samples = {i: replace(sample, routing=None) for i, sample in samples.items()}
        return [
            pack_samples(
                [samples[i] for i in m.sample_ids],
                self.runtime.device,
                shard=self.layout.shard,
                multiple_of=self.layout.token_multiple,
                is_filler=m.is_filler,
                balance=balance if self.arch.experts else None,
            )
            for m in plan.replicas[self.layout.replica]
        ]


def _outputs(head: LogprobHead | ValueHead, hidden_t1H: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities or values (N,) of a microbatch, with their sum for the schedule. Nothing is
    differentiated."""
    output_N, _ = head(hidden_t1H, batch)
    return output_N.sum(), output_N.detach().float()


@dataclass(frozen=True)
class Update:
    """Result of one update on a minibatch, the same on every rank of the world."""

    applied: bool
    finite: bool
    sums: dict[str, float]
    """Summed metrics of the minibatch, as in `megappo_kernels.metrics`."""
    grad_norm: float
    """Global L2 norm before clipping; NaN if the update was skipped before the gradients were reduced."""
    learning_rate: float
    router_aux_loss: float | None = None
    """Mean load-balancing loss of a layer without its weight; None without this loss."""


class TrainedRole(LocalRole):
    """Role with gradients and an optimizer, on one of its ranks."""

    def __init__(self, placement: Placement, model: RoleModel, runtime: Runtime, optimizer: RoleOptimizer) -> None:
        self.optimizer = optimizer
        super().__init__(placement, model, runtime)
        self._chunks = optimizer.chunks

    def _tensors(self) -> RoleTensors:
        return self.optimizer.tensors()

    def rest(self) -> None:
        self.optimizer.settle_weights()
        self.storage.rest()

    def parameters(self) -> list[nn.Parameter]:
        self.optimizer.settle_weights()
        return super().parameters()

    def run_update(
        self,
        plan: MicrobatchPlan,
        samples: Mapping[int, PlacedSample],
        task: Task[Head, Mapping[str, Tensor]],
        stop_above: tuple[str, float] | None,
    ) -> Update:
        """Run one optimizer update on the microbatches of all replicas (see `PlacedBatch.update`)."""
        balance = self.options.router_aux_loss_coef / len(plan.replica_of())
        batches, optimizer = self._packed(plan, samples, balance=balance), self.optimizer
        self.storage.bring_all()
        optimizer.zero_grad()
        reports = run_schedule(self._chunks, self.layout, batches, task, train=True)
        sums, uneven = self._reduce(batches, reports)
        rate = optimizer.learning_rate
        # The sums cover the whole role, so either all of its ranks skip the update or no rank does.
        if stop_above is not None and sums[stop_above[0]] > stop_above[1] * sums["count"]:
            return Update(False, True, sums, float("nan"), rate, uneven)
        finite_loss = bool(torch.isfinite(torch.tensor(sums["loss"])))
        self.storage.await_optimizer()
        applied, grad_norm = optimizer.step() if finite_loss else (False, float("nan"))
        return Update(applied, applied, sums, grad_norm, rate, uneven)

    def _reduce(
        self, batches: Sequence[PackedBatch], reports: Sequence[Mapping[str, Tensor]]
    ) -> tuple[dict[str, float], float | None]:
        """Combine the metrics of all microbatches, context ranks and replicas, and the load-balancing losses of all
        layers. All ranks of the role must call this method, and every rank gets the result."""
        local: dict[str, float] = {}
        if self.layout.reports_losses:
            real = [r for b, r in zip(batches, reports, strict=True) if not b.is_filler] or [
                {k: torch.zeros_like(v) for k, v in reports[0].items()}
            ]
            combined = combine(stacked(real))
            numbers = torch.stack([value.double() for value in combined.values()]).tolist()  # one read for all
            local = dict(zip(combined, numbers, strict=True))
        results = all_gather_objects(
            (local, summed_losses(batch.segments.routing for batch in batches)), self.layout.role_group
        )
        parts = [part for part, _ in results if part]
        of_role = {name: torch.tensor([part[name] for part in parts], dtype=torch.float64) for name in parts[0]}
        weight = self.options.router_aux_loss_coef * len(self.arch.expert_layers)
        uneven = sum(loss for _, loss in results) / weight if weight else None
        return {name: float(value) for name, value in combine(of_role).items()}, uneven


class SharedBase(LocalRole):
    """Reference that is the actor with its adapters off, on one of its ranks. The reference has no separate weights,
    so its weights are offloaded and loaded with the actor's weights."""

    def __init__(self, actor: TrainedRole) -> None:
        Role.__init__(self, actor.placement, actor.arch, replace(actor.options, replays_routing=False), actor.runtime)
        self.model, self.storage, self._chunks, self._actor = actor.model, actor.storage, actor.optimizer.chunks, actor
        self._report = None

    def rest(self) -> None:
        self._actor.rest()

    def read_shard(self, shard: LocalShard) -> Tensor:
        return self._stored(shard)

    def run_forward(self, plan: MicrobatchPlan, samples: Mapping[int, PlacedSample]) -> dict[int, Tensor]:
        assert self.model.switch is not None
        with self.model.switch.off():
            return super().run_forward(plan, samples)


def base_of(actor: Role) -> Role:
    """Return the model without the adapters of a trained role, on every rank."""
    return SharedBase(actor) if isinstance(actor, TrainedRole) else actor
