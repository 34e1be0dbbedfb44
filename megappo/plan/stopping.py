"""How long a run takes to stop, and how often it should write a checkpoint.

A signal stops the run while an engine generates, and between a step's stages; but once a step has begun its updates,
it is finished: critic, actor, weight sync. Then the run waits for a checkpoint that is still being written, and writes
the last one. The scheduler's lead time has to cover all of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megappo.config import Config
from megappo.plan.costs import StageCost
from megappo.plan.elements import adapter_elements, frozen_elements
from megappo.plan.inputs import RoleSetup, Setup
from megappo.plan.machines import ASSUMED, Machine
from megappo.plan.sizes import model_sizes

_SLACK = 1.5
"""Factor by which a plan may be too short: a whole step on an H100 took 1.15 times the plan, published runs 0.9 to 1.8
times (benchmarks/results/2026-11-26-h100-whole-step.md, 2026-11-21-plan-published.md)."""
_ROUND_SECONDS = 60
"""A scheduler's signal may be a minute late; the lead time is rounded up to minutes for that."""
_LOST_SECONDS = 1800.0
"""Most seconds of work that a killed run should lose."""
_INTERVALS = (1, 2, 5, 10, 20, 50)


@dataclass(frozen=True)
class Stopping:
    """Lead time for a scheduler, and the interval for `checkpoint`."""

    uninterruptible_seconds: float
    """The longest piece of a step that is finished before the run stops."""
    checkpoint_bytes: float
    checkpoint_seconds: float
    """Seconds to write a checkpoint, by the assumed bandwidth of a node."""
    lead_seconds: int
    """Seconds that the scheduler must leave between its signal and its kill."""
    every_steps: int
    """Recommended `checkpoint.every_steps`: at most half an hour of work is lost, unless a step or the writing takes
    longer, and a checkpoint is written before the next one is due."""
    lost_seconds: float
    """Seconds of work that a run loses when it is killed at the worst moment, with checkpoints as often as
    recommended."""

    def sentence(self, config: Config) -> str:
        """What to tell the scheduler, and what to change."""
        words = (
            f"stopping takes up to {self.lead_seconds} seconds: sbatch --signal=USR1@{self.lead_seconds}; a checkpoint "
            f"of {_size(self.checkpoint_bytes)}"
        )
        given = config.checkpoint.every_steps if config.checkpoint is not None else None
        if given is None:
            return f"{words}, were there one: checkpoint is null, and a run that ends early is lost"
        if given == self.every_steps:
            return f"{words} every {_steps(given)} loses at most {self.lost_seconds / 60:.2g} minutes"
        return (
            f"{words}, every {_steps(given)}: checkpoint.every_steps={self.every_steps} would suit the time of a step"
        )


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.3g} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.3g} MB"


def stopping(setup: Setup, stages: Sequence[StageCost], machine: Machine, step_seconds: float) -> Stopping:
    """Lead time and checkpoint interval of a run; `machine` and `stages` are one rank's."""
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
    """Bytes of a role in a checkpoint, all in float32: weights, and two moments of those that are trained. Adapters are
    written without the weights that they adapt."""
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
