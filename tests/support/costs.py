"""Measures of one stage of a step on machines with one finite resource, and short names of the odd sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megappo.families.declaration import ArchitectureConfig
from megappo.plan.costs import StageCost
from megappo.plan.hardware.machines import Machine
from tests.support import plan
from tests.support.plan import machine

H, F, D, P, T = plan.HIDDEN, plan.FFN, plan.HEAD_DIM, plan.PROMPT, plan.PROMPT + plan.RESPONSE
Stage = Callable[[Machine], StageCost]
Q, K = plan.HEADS * D, plan.KV_HEADS * D
LAUNCH_SECONDS, TRAINER_LAUNCH_SECONDS = 0.4e-3, 1.4e-3


def about(number: float) -> object:
    return pytest.approx(number, rel=1e-9, abs=0)


def arithmetic(stage: Stage) -> float:
    """Return the FLOPs of the busiest rank."""
    cost = stage(machine(bfloat16_flops=1.0))
    assert cost.bound_by == "compute"
    return cost.seconds * 0.4


def memory_bytes(stage: Stage) -> float:
    """Return the bytes of memory traffic of the busiest rank."""
    cost = stage(machine(memory_bandwidth=1.0))
    assert cost.bound_by == "memory" and cost.seconds * 0.7 == about(cost.memory_bytes)
    return cost.memory_bytes


def launched_layers(stage: Stage, seconds: float = LAUNCH_SECONDS) -> float:
    """Return the number of layers with kernels that the host launches."""
    cost = stage(machine())
    assert cost.bound_by == "launches"
    return cost.seconds / seconds


def sent_bytes(stage: Stage, devices_per_node: int) -> tuple[float, float]:
    """Return the bytes that the busiest rank sends inside its node, and to other nodes."""
    sent = []
    waiting = stage(machine()).seconds
    for link in ("intra_node_bandwidth", "inter_node_bandwidth"):
        cost = stage(machine(**{link: 1e-3}, devices_per_node=devices_per_node))
        sent.append((cost.seconds - waiting) * 0.7e-3)
    assert sum(sent) == about(cost.link_bytes)
    return sent[0], sent[1]


def layer_weights(model: ArchitectureConfig) -> int:
    """Return the weights that a token uses in one layer: QKV, output matrix, SwiGLU or router and chosen experts, and
    norms."""
    feed_forward = model.experts * H + plan.PER_TOKEN * 3 * H * F if model.experts else 3 * H * F
    return H * (Q + 2 * K) + Q * H + feed_forward + 2 * H + 2 * D
