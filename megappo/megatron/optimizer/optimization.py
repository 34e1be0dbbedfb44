"""Megatron's data parallel wrapper, optimizer and learning rate schedule for one role."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megappo.config.sections.roles import OptimizerSettings
from megappo.megatron.build import RoleModel
from megappo.megatron.optimizer.host_optimizer import PartlyOnHost
from megappo.megatron.optimizer.offload import RoleTensors
from megappo.megatron.optimizer.optimizer_state import MOMENTS, OptimizerState
from megappo.megatron.patches.all_devices import fix_gradient_norm, param_groups_of_role
from megappo.megatron.patches.cpu import gather_one_by_one
from megappo.megatron.schedule import finalize_summed_grads

_STYLES = {"inverse_sqrt": "inverse-square-root", "wsd": "WSD"}
"""Names of schedules in Megatron that differ from megappo's names."""
PIECE = 2**17
"""Number of elements that are converted at the same time. Their float32 copy fits into the cache of a core (see the
addition in pieces in benchmarks/results/2026-11-23-update-cpu.md)."""


class AccumulatedParameter(Protocol):
    """Parameter with the attributes of Megatron's gradient buffers and one additional attribute."""

    grad: Tensor | None
    main_grad: Tensor
    grad_added_to_main_grad: bool
    has_zero_main_grad: bool
    """Whether `main_grad` represents zeros, independent of the stored values."""

    def register_post_accumulate_grad_hook(self, hook: Callable[[AccumulatedParameter], None]) -> RemovableHandle:
        """Call the hook each time `grad` is complete."""


def add_to_main_grad(parameter: AccumulatedParameter) -> None:
    """Add the gradient of a parameter to Megatron's float32 gradient and free the gradient. Zeros
    (`has_zero_main_grad`) are overwritten.

    Megatron's hook runs after this hook and would create a float32 copy of the whole gradient. The function depends
    only on the parameter, because Python's garbage collector does not see objects that hooks reference.
    """
    is_zero, parameter.has_zero_main_grad = parameter.has_zero_main_grad, False
    added = parameter.grad_added_to_main_grad and not getattr(parameter, "zero_out_wgrad", False)
    if parameter.grad is None or added:
        return
    if is_zero and not parameter.grad_added_to_main_grad:
        parameter.main_grad.copy_(parameter.grad)
    else:
        totals, gradients = (x.view(-1).split(PIECE) for x in (parameter.main_grad, parameter.grad.contiguous()))
        for total, gradient in zip(totals, gradients, strict=True):
            total.add_(gradient)
    parameter.grad = None


def clip_gradients(optimizers: Iterable[MegatronOptimizer], grad_norm: float) -> None:
    """Scale the gradients of Megatron's optimizers down if their norm `grad_norm` exceeds the configured norm.

    Megatron's `clip_grad_by_total_norm_fp32` copies each gradient if Apex is not installed. The fused AdamW of torch
    scales gradients while it reads them.
    """
    for inner in optimizers:
        allowed = inner.config.clip_grad
        factor = allowed / (grad_norm + 1e-6) if allowed > 0 else 1.0
        gradients = [main.grad for main in inner.get_parameters() if main.grad is not None]
        if _is_fused(inner.optimizer):
            inner.optimizer.grad_scale = torch.tensor(1 / factor) if factor < 1.0 else None
        elif factor < 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)


def _is_fused(optimizer: torch.optim.Optimizer | PartlyOnHost) -> bool:
    return isinstance(optimizer, torch.optim.AdamW) and all(group["fused"] for group in optimizer.param_groups)


def rate_schedule(
    optimizer: MegatronOptimizer, settings: OptimizerSettings, total_updates: int
) -> OptimizerParamScheduler:
    """Return the learning rate schedule of a role with `total_updates` updates in the run. Call `step` of the schedule
    after each update."""
    warmup = settings.warmup(total_updates)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if warmup else settings.learning_rate,
        max_lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(total_updates, warmup + 1),
        lr_decay_style=_STYLES.get(settings.schedule, settings.schedule),
        wsd_decay_steps=settings.decay(total_updates),
        lr_wsd_decay_style="linear",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )


class RoleOptimizer:
    """Gradients, AdamW and the schedule of a role on one rank. All ranks of the role must construct it together."""

    def __init__(self, model: RoleModel, settings: OptimizerSettings, total_updates: int) -> None:
        bf16, on_cuda = model.options.dtype == torch.bfloat16, model.options.device.type == "cuda"
        grid = model.layout.grid
        self._gathers_late = settings.gathers_in_forward(grid, on_cuda=on_cuda)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=settings.reduces_in_backward(on_cuda=on_cuda),
            overlap_param_gather=self._gathers_late,
            align_param_gather=self._gathers_late,  # `step` starts the gathers of all chunks
            use_distributed_optimizer=settings.shards_state(grid),
        )
        self.chunks = [
            DistributedDataParallel(model.config, ddp, chunk, pg_collection=model.layout.groups)
            for chunk in model.chunks
        ]
        model.config.finalize_model_grads_func = finalize_summed_grads
        if ddp.overlap_grad_reduce:  # gradients are accumulated over microbatches before the reduction
            without_sync = [chunk.no_sync for chunk in self.chunks]
            model.config.no_sync_func = without_sync if len(without_sync) > 1 else without_sync[0]
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            min_lr=settings.min_learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad_norm,
            bf16=bf16,
            params_dtype=model.options.dtype,
            use_distributed_optimizer=settings.shards_state(grid),
        )
        fix_gradient_norm()
        if not on_cuda:
            gather_one_by_one()
        with param_groups_of_role(model.layout.role_group):
            self.megatron = get_megatron_optimizer(
                config, self.chunks, use_gloo_process_groups=False, pg_collection=model.layout.groups
            )
        inners = getattr(self.megatron, "chained_optimizers", [self.megatron])
        self._inners = [inner for inner in inners if inner.optimizer is not None]  # None if dense weights are frozen
        self._accumulated: list[AccumulatedParameter] = []
        """Parameters with gradients that `add_to_main_grad` accumulates."""
        if bf16 and not on_cuda:
            self._spare_memory(adds_at_once=ddp.overlap_grad_reduce)
        for inner in self._inners if settings.on_host else ():
            inner.optimizer = PartlyOnHost(inner.optimizer, settings.on_host, self._weight_storages())
        self._on_host = [inner.optimizer for inner in self._inners if isinstance(inner.optimizer, PartlyOnHost)]
        self.state = OptimizerState(self._inners, model.layout.groups.dp_cp, model.layout.groups.expt_dp)
        self._schedule = rate_schedule(self.megatron, settings, total_updates)
        self.updates = 0
        """Number of applied updates."""

    def _spare_memory(self, *, adds_at_once: bool) -> None:
        """Reduce the number of passes over the memory of a CPU.

        The AdamW of torch takes five times as long if it is not fused. Megatron does not request the fused version,
        and torch reads the option at every step. The fused version differs in the last bits of float32, which are far
        below the precision of bfloat16. Float32 models keep the loop.
        """
        for inner in self._inners:
            for group in inner.optimizer.param_groups:
                group["fused"] = True
        if not adds_at_once:
            self._accumulated += (p for chunk in self.chunks for p in chunk.parameters() if p.requires_grad)
        for parameter in self._accumulated:
            parameter.has_zero_main_grad = False
            parameter.register_post_accumulate_grad_hook(add_to_main_grad)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return float(self.megatron.param_groups[0]["lr"])

    @property
    def place(self) -> int:
        """Position of the schedule among the role's updates of the run. The position equals `updates` unless the
        number of updates per step was different earlier."""
        return int(self._schedule.num_steps)

    def continue_after(self, updates: int, place: int) -> None:
        """Continue after `updates` updates, at the position `place` of the schedule."""
        self.updates, self._schedule.num_steps = updates, 0
        self._schedule.step(increment=place)

    def tensors(self) -> RoleTensors:
        """Return all tensors of the role on the device."""
        return RoleTensors(
            weights=lambda: (p for chunk in self.chunks for p in chunk.parameters()),
            gradients=lambda: (b.grad_data for c in self.chunks for b in (*c.buffers, *c.expert_parallel_buffers)),
            optimizer=self._state_tensors,
            optimizer_bytes=self._state_bytes,
        )

    def _state_tensors(self) -> Iterator[Tensor]:
        weights = self._weight_storages()
        for main, moments in self.state.mains():
            yield from moments.values()
            if main.untyped_storage()._cdata not in weights:
                yield main

    def _state_bytes(self) -> int:
        weights, total = self._weight_storages(), 0
        for main, _ in self.state.mains():
            is_weight = main.untyped_storage()._cdata in weights
            total += main.numel() * main.itemsize * (len(MOMENTS) + (not is_weight))
        return total

    def _weight_storages(self) -> set[int]:
        """Return the identities of the storages of the weights. The main weights of a float32 model share these
        storages in the distributed optimizer."""
        return {p.untyped_storage()._cdata for chunk in self.chunks for p in chunk.parameters()}

    def zero_grad(self) -> None:
        """Reset the gradients of the last minibatch."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        for parameter in self._accumulated:
            parameter.has_zero_main_grad = True
        self.megatron.zero_grad()

    def step(self) -> tuple[bool, float]:
        """Apply the gradients unless their norm is not finite. Return whether they were applied, and the norm before
        clipping."""
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        # The norm is global, so either all ranks of the role join the gather of the step below or no rank does.
        if not math.isfinite(grad_norm):
            return False, grad_norm
        clip_gradients(self._inners, grad_norm)
        self.megatron.step_with_ready_grads()
        for optimizer in self._on_host:
            optimizer.release()
        self._schedule.step(increment=1)
        self.updates += 1
        if self._gathers_late:
            for chunk in self.chunks:
                chunk.start_param_sync()
        return True, grad_norm

    def settle_weights(self) -> None:
        """Wait for all weights that other ranks updated. A forward pass waits only for the weights of the next part of
        the model."""
        for chunk in self.chunks if self._gathers_late else ():
            for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
                if group.param_gather_handle is not None:
                    group.finish_param_sync(skip_next_bucket_dispatch=True)
