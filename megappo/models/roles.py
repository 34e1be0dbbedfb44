"""Actor, critic and reference: models on their layouts, fed by every rank of the world.

A rank that made samples (their home) hands them to `score` or `update`; they travel to the ranks of the replica that
processes them, and scores travel back. Every method here is a collective of the whole world, also for ranks on which
the role has no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.errors import RunError
from megappo.models.build import RoleModel
from megappo.models.jumps import Jump, JumpWatch
from megappo.models.layout import Grid, Layout
from megappo.models.packing import Plan, plan_microbatches
from megappo.models.schedule import PackedBatch, Task, pack_rows, run_schedule
from megappo.runtime import Runtime
from megappo.runtime.exchange import Row, all_gather_varying, exchange_rows
from megappo_kernels import merge_whiten_stats


@dataclass(frozen=True)
class Placement:
    """Where a role stands, known on every rank."""

    name: str
    grid: Grid
    budget_tokens: int
    microbatch_multiple: int
    """Interleaved pipelines run a multiple of the pipeline size."""
    layout: Layout | None
    """None on ranks outside the role."""


class Role:
    """A model that can be evaluated on samples from anywhere."""

    def __init__(self, placement: Placement, model: RoleModel | None, runtime: Runtime) -> None:
        assert (model is None) == (placement.layout is None)
        self.placement, self.model, self.runtime = placement, model, runtime
        self._chunks: Sequence[Any] = model.chunks if model is not None else ()

    def _deliver(self, rows: Sequence[Row]) -> tuple[list[PackedBatch], dict[int, int]]:
        """Send this rank's rows to their replicas; returns the microbatches to run here and every sample's home."""
        device, world = self.runtime.device, _world()
        local = torch.tensor([[r.sample_id, len(r.integers)] for r in rows], dtype=torch.int64, device=device)
        gathered = all_gather_varying(local.reshape(-1, 2), group=world)
        homes = {int(i): rank for rank, part in enumerate(gathered) for i in part[:, 0].tolist()}
        lengths = {int(i): int(n) for part in gathered for i, n in part.tolist()}
        grid = self.placement.grid
        plan = plan_microbatches(
            lengths,
            replicas=grid.dp,
            budget_tokens=self.placement.budget_tokens,
            multiple_of=self.placement.microbatch_multiple,
            in_step=grid.replicas_in_step,
        )
        replicas = plan.replicas_of()
        destinations = [[rank for d in replicas[r.sample_id] for rank in grid.replica_ranks(d)] for r in rows]
        received = exchange_rows(rows, destinations, group=world, device=device)
        return self._microbatches(plan, received), homes

    def _microbatches(self, plan: Plan, received: Sequence[Row]) -> list[PackedBatch]:
        layout = self.placement.layout
        if layout is None:
            return []
        row_of = {r.sample_id: r for r in received}
        return [
            pack_rows([row_of[i] for i in m.sample_ids], layout, self.runtime.device, is_filler=m.is_filler)
            for m in plan.replicas[layout.replica]
        ]

    def copy_weights(self) -> list[Tensor]:
        """This rank's part of the model, in the host's memory; nothing on ranks outside the role."""
        return [p.detach().to("cpu", copy=True) for p in self._parameters()]

    @torch.no_grad()
    def exchange_weights(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Put what `copy_weights` gave once in the model's place; returns a copy of what was there."""
        before = self.copy_weights()
        for parameter, tensor in zip(self._parameters(), weights, strict=True):
            parameter.copy_(tensor)
        return before

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self.model.chunks for p in chunk.parameters()] if self.model is not None else []

    def score(self, rows: Sequence[Row]) -> dict[int, Tensor]:
        """Run the model forward; returns for each of this rank's samples the output (R, channels) of its response."""
        batches, homes = self._deliver(rows)
        layout = self.placement.layout
        results: list[Row] = []
        if layout is not None:
            with self.runtime.megatron():
                outputs = run_schedule(self._chunks, layout, batches, _Scoring(), train=False)
            if layout.hands_out_results:
                for batch, output_NC in zip(batches, outputs, strict=True):
                    results += _rows_of(batch, output_NC)
        returned = exchange_rows(
            results, [[homes[r.sample_id]] for r in results], group=_world(), device=self.runtime.device
        )
        return {r.sample_id: r.floats.T for r in returned}


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class _Scoring:
    """Hands out what the output layer says."""

    def expect(self, head: Any, batch: PackedBatch) -> None:
        """Name the rows and the tokens they predict."""
        head.expect(batch.rows_N, batch.labels_N)

    def finish(self, output_NC: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The output as it is."""
        return output_NC.sum(), output_NC.detach().float()


def _rows_of(batch: PackedBatch, output_NC: Tensor) -> list[Row]:
    """Cut the output of a microbatch back into samples; a filler has none to give."""
    if batch.is_filler:
        return []
    nothing = torch.empty(0, dtype=torch.int64)
    return [
        Row(sample_id, nothing, piece.T.contiguous())
        for sample_id, piece in zip(batch.sample_ids, output_NC.split(batch.response_lengths), strict=True)
    ]


def combine_metrics(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One report of (R,) reports of parts of a batch.

    Sums, but maxima of names ending in `_max`, and of pairs ending in `_mean` and `_m2` the statistics of the union of
    `count` tokens each.
    """
    combined = {}
    for name, values_R in parts.items():
        if name.endswith("_max"):
            combined[name] = values_R.amax()
        elif name.endswith("_mean"):
            m2 = f"{name.removesuffix('_mean')}_m2"
            _, mean, squares = merge_whiten_stats(torch.stack([parts["count"], values_R, parts[m2]], dim=1)).unbind()
            combined |= {name: mean, m2: squares}
        elif not name.endswith("_m2"):
            combined[name] = values_R.sum()
    return {name: combined[name] for name in parts}


class NonFiniteUpdateError(RunError):
    """A loss or gradient was not finite; the weights were left alone."""


@dataclass(frozen=True)
class Update:
    """What one minibatch did; the same on every rank of the role."""

    applied: bool
    finite: bool
    sums: dict[str, float]
    """Metrics of the minibatch, as `combine_metrics` makes one of many."""
    grad_norm: float
    """Global L2 norm before clipping; NaN where the update was refused before gradients were reduced."""
    learning_rate: float


class TrainedRole(Role):
    """A role with gradients and an optimizer."""

    def __init__(self, placement: Placement, model: RoleModel | None, runtime: Runtime, trainer: Any) -> None:
        super().__init__(placement, model, runtime)
        self._trainer = trainer
        self.on_refused: Callable[[Any], str] | None = None
        """Is handed each `RefusedUpdate` on every rank; returns what to tell the user."""
        self.jump_watch: JumpWatch | None = None
        self.on_jump: Callable[[Jump], None] | None = None
        """Is handed each update that stands out, on every rank."""
        if trainer is not None:
            self._chunks = trainer.chunks

    @property
    def optimizer(self) -> Any:
        """Its `RoleOptimizer`; None on ranks outside the role, and where nothing is trained."""
        return self._trainer

    def update_minibatch(
        self, rows: Sequence[Row], task: Task, *, stop_above: tuple[str, float] | None = None
    ) -> Update | None:
        """One optimizer update from all ranks' rows of a minibatch.

        `task` gives the weighted sum to differentiate and a dict of metric sums with `loss` and `count` among them.
        `stop_above` names a metric and the mean per `count` from which the update is refused.
        Returns None on ranks outside the role.
        """
        batches, _ = self._deliver(rows)
        layout = self.placement.layout
        if layout is None:
            return None
        with self.runtime.megatron():
            self._trainer.zero_grad()
            reports = run_schedule(self._chunks, layout, batches, task, train=True)
            sums = self._reduce(layout, batches, reports)
            rate = self._trainer.learning_rate
            if stop_above is not None and sums[stop_above[0]] > stop_above[1] * sums["count"]:
                return Update(False, True, sums, float("nan"), rate)
            finite_loss = bool(torch.isfinite(torch.tensor(sums["loss"])))
            applied, grad_norm = self._trainer.step() if finite_loss else (False, float("nan"))
        return Update(applied, applied, sums, grad_norm, rate)

    def _reduce(self, layout: Layout, batches: Sequence[PackedBatch], reports: list[Any]) -> dict[str, float]:
        """Combine the reports of all microbatches and replicas; every rank of the role gets the result."""
        names: list[str] | None = None
        local: dict[str, Tensor] = {}
        if layout.hands_out_results:
            real = [r for b, r in zip(batches, reports, strict=True) if not b.is_filler] or [
                {k: torch.zeros_like(v) for k, v in reports[0].items()}
            ]
            names = sorted(real[0])
            local = combine_metrics({k: torch.stack([r[k].double() for r in real]) for k in names})
        shared = [names]
        dist.broadcast_object_list(shared, src=layout.grid.output_rank(0), group=layout.role_group)
        names = shared[0]
        assert names is not None
        nothing = torch.empty(0, len(names), dtype=torch.float64, device=self.runtime.device)
        row = torch.stack([local[name] for name in names])[None] if local else nothing
        rows_RN = torch.cat(all_gather_varying(row, group=layout.role_group)).cpu()
        combined = combine_metrics(dict(zip(names, rows_RN.unbind(1), strict=True)))
        return {name: float(value) for name, value in combined.items()}
