"""Time that a run needs to stop, and the interval between checkpoints.

A signal stops the run during generation and between the stages of a step. After the updates of a step have begun, the
run first finishes the critic update, the actor update and the weight sync. The run then waits for a checkpoint that is
being written and writes a final checkpoint. The lead time of the scheduler must cover this time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megappo.config import Config
from megappo.plan.bytes.elements import adapter_elements, frozen_elements
from megappo.plan.bytes.sizes import model_sizes
from megappo.plan.costs import StageCost
from megappo.plan.hardware.machines import ASSUMED, Machine
from megappo.plan.inputs import RoleSetup, Setup

_SLACK = 1.5
"""Safety factor on planned seconds. A whole step on an H100 took 1.15 times the planned time, and published runs took
0.9 to 1.8 times (benchmarks/results/2026-11-26-h100-whole-step.md, 2026-11-21-plan-published.md)."""
_ROUND_SECONDS = 60
"""Unit of the lead time in seconds. The lead time is rounded up to minutes, because the signal of a scheduler may be a
minute late."""
_LOST_SECONDS = 1800.0
"""Largest amount of work in seconds that a killed run should lose."""
_INTERVALS = (1, 2, 5, 10, 20, 50)


@dataclass(frozen=True)
class Stopping:
    """Lead time for a scheduler, and recommended settings of `checkpoint`."""

    uninterruptible_seconds: float
    """Longest time in seconds for which a step continues before the run stops."""
    checkpoint_bytes: float
    checkpoint_seconds: float
    """Seconds to write a checkpoint at the assumed bandwidth of a node."""
    lead_seconds: int
    """Required seconds between the signal and the kill of the scheduler."""
    every_steps: int
    """Recommended `checkpoint.every_steps`. At most half an hour of work is lost unless a step or a checkpoint takes
    longer. A checkpoint is written before the next one is due."""
    lost_seconds: float
    """Seconds of work that a run loses at most if it is killed and checkpoints are written at the recommended
    interval."""

    def sentence(self, config: Config) -> str:
        """Return the advice on the lead time and the checkpoint interval as a sentence."""
        advice = (
            f"stopping takes up to {self.lead_seconds} seconds: sbatch --signal=USR1@{self.lead_seconds}; a checkpoint "
            f"of {_size(self.checkpoint_bytes)}"
        )
        every_steps = config.checkpoint.every_steps if config.checkpoint is not None else None
        if every_steps is None:
            return f"{advice} is not written: checkpoint is null, and a run that ends early is lost"
        if every_steps == self.every_steps:
            return f"{advice} every {_steps(every_steps)} loses at most {self.lost_seconds / 60:.2g} minutes"
        return (
            f"{advice} is written every {_steps(every_steps)}; checkpoint.every_steps={self.every_steps} suits the "
            "time of a step"
        )


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.3g} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.3g} MB"


def stopping(setup: Setup, stages: Sequence[StageCost], machine: Machine, step_seconds: float) -> Stopping:
    """Return the lead time and checkpoint interval of a run. `machine` and `stages` are those of one rank."""
    seconds = {stage.name: stage.seconds for stage in stages}
    finished = math.fsum(s for name, s in seconds.items() if name.startswith("update_") or name == "sync")
    piece = max(seconds["forward"], finished)
    n_bytes = math.fsum(_state_bytes(role) for role in setup.roles if role.trained or role.changes)
    nodes = 1 if machine.shared_by_ranks else math.ceil(setup.work.world_size / machine.devices_per_node)
    write = n_bytes / (nodes * ASSUMED.checkpoint_bytes_per_second)
    lead = _SLACK * (piece + 2 * write)
    between = max(1.0, _LOST_SECONDS / step_seconds)
    often = [n for n in _INTERVALS if n <= between and (n * step_seconds >= write or n == _INTERVALS[-1])]
    every = max(often, default=next((n for n in _INTERVALS if n * step_seconds >= write), _INTERVALS[-1]))
    return Stopping(
        uninterruptible_seconds=piece,
        checkpoint_bytes=n_bytes,
        checkpoint_seconds=write,
        lead_seconds=_ROUND_SECONDS * (1 + math.ceil(lead / _ROUND_SECONDS)),
        every_steps=every,
        lost_seconds=every * step_seconds,
    )


def _state_bytes(role: RoleSetup) -> float:
    """Return the bytes of a role in a checkpoint. All tensors are float32: the weights, and two moments of each
    trained weight. Adapters are written without the base weights."""
    arch, value_head = role.arch, role.arch.hidden_size + 1 if role.is_critic else 0
    if role.lora is not None:
        return 12.0 * (adapter_elements(arch, role.lora) + value_head)
    weights, _, head = model_sizes(arch)
    weights += value_head
    if role.is_critic and not arch.tied_embeddings:
        weights -= head
    dense, of_expert = frozen_elements(arch, role.freeze, None, 1, arch.vocab_size)
    trained = weights - dense.total() - arch.experts * of_expert.total() if role.trained else 0
    return 4.0 * weights + 8.0 * trained
