"""Settings that change the speed of an update and must not change its results, on and off.

To add a setting, add a line to SWITCHES.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from megappo.config import load_config
from megappo.errors import ConfigError
from megappo.megatron.build import DTYPES
from megappo.ppo.trainer import Trainer
from megappo.preflight.resolved import resolve_for_device
from megappo.runtime.accelerations import find_accelerations
from tests.gpu.acceptance.ppo_step import Speed, update_speed
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, measured, skipped, within
from tests.gpu.acceptance.workload import (
    ACTOR_ONLY,
    Size,
    empty_cache,
    model_folder,
    rollouts,
    samples,
    settings,
    trainer,
    write_settings,
)
from tests.support.places import ROOT

NATS = {"float32": 1e-5, "bfloat16": 0.05}
"""Bound of the mean gap of log-probabilities before the update."""
CHANGES = {"float32": 1e-3, "bfloat16": 0.1}
"""Bound of the relative difference of all weight changes."""
_SIDE_SECONDS = 100.0


@dataclass(frozen=True)
class Switch:
    """A setting and its alternative."""

    name: str
    on: tuple[str, ...]
    off: tuple[str, ...] = ()
    model: str = "0.6B"
    own_process: bool = False
    """Whether the setting takes effect only at the import of Megatron-Core."""


_OPTIMIZER = "actor.optimizer"
_SHARDED = (f"{_OPTIMIZER}.distributed=true", f"{_OPTIMIZER}.overlap_grad_reduce=true")
SWITCHES = (
    Switch("recompute: full", ("actor.recompute=full",), ("actor.recompute=none",)),
    Switch("recompute: selective", ("actor.recompute=selective",), ("actor.recompute=none",)),
    Switch(
        "recompute: MLPs", ("actor.recompute=selective", "actor.recompute_modules=[mlp]"), ("actor.recompute=none",)
    ),
    Switch(
        "overlap_grad_reduce", (f"{_OPTIMIZER}.overlap_grad_reduce=true",), (f"{_OPTIMIZER}.overlap_grad_reduce=false",)
    ),
    Switch(
        "overlap_param_gather",
        (*_SHARDED, f"{_OPTIMIZER}.overlap_param_gather=true"),
        (*_SHARDED, f"{_OPTIMIZER}.overlap_param_gather=false"),
    ),
    Switch("optimizer.distributed", ("actor.optimizer.distributed=true",), ("actor.optimizer.distributed=false",)),
    Switch("offload", ("actor.offload=true",)),
    Switch("optimizer.on_host", (f"{_OPTIMIZER}.on_host=0.5",)),
    Switch("accelerations", ("model.accelerations=auto",), ("model.accelerations=torch",), own_process=True),
    Switch("one pack, not four", ("actor.microbatch_budget_tokens={all}",), ("actor.microbatch_budget_tokens={part}",)),
)


@dataclass(frozen=True)
class Side:
    """Results of an update with a switch on or off. The tensors are in host memory."""

    logprob: Tensor
    changes: list[Tensor]
    speed: Speed
    layers: str
    """Implementation of layers, gradients and Adam."""


def on_and_off(place: Place) -> Iterator[Row]:
    """Compare the numbers of an update and its seconds for every switch."""
    dtype = "float32" if place.device == "cpu" else "bfloat16"
    cache: dict[tuple[str, ...], Side] = {}
    for switch in SWITCHES:
        try:
            on, off = _side(place, switch, switch.on, dtype, cache), _side(place, switch, switch.off, dtype, cache)
        except ConfigError as error:
            yield skipped(switch.name, "; ".join(error.problems))
            continue
        if switch.own_process and on.layers == off.layers:
            yield skipped(switch.name, f"both sides run the same code: {on.layers}")
            continue
        if switch.own_process:
            yield measured(f"{switch.name}: what does what", f"on: {on.layers}; off: {off.layers}")
        gap = float((on.logprob - off.logprob).abs().mean())
        yield within(f"{switch.name}: log-probabilities, {dtype}", {"mean gap, nats": gap}, NATS[dtype])
        squares = sum(float((a - b).square().sum()) for a, b in zip(on.changes, off.changes, strict=True))
        sizes = sum(float(b.square().sum()) for b in off.changes)
        yield within(
            f"{switch.name}: changes of weights, {dtype}", {"changes": (squares / sizes) ** 0.5}, CHANGES[dtype]
        )
        yield measured(
            f"{switch.name}: time", f"on: {on.speed.summary(place)}, peak {on.speed.peak_bytes / 1e9:.1f} GB; off: "
            f"{off.speed.summary(place)}, peak {off.speed.peak_bytes / 1e9:.1f} GB; on takes "
            f"{on.speed.seconds / off.speed.seconds:.2f} of off",
            on_seconds=on.speed.seconds, off_seconds=off.speed.seconds,
            on_peak_bytes=on.speed.peak_bytes, off_peak_bytes=off.speed.peak_bytes,
        )  # fmt: skip


def _side(
    place: Place, switch: Switch, overrides: tuple[str, ...], dtype: str, cache: dict[tuple[str, ...], Side]
) -> Side:
    """Run one side of a switch. Equal settings are run only once."""
    size = Size(8, 8, 24) if place.tiny else Size(32, 256, 768)
    whole = size.samples * (size.prompt + size.response)
    names = {"all": whole, "part": whole // 4}
    # Epsilon has the size of a gradient, so the step of Adam is not the sign of rounding errors.
    common = [
        "actor.optimizer.learning_rate=0.001",
        "actor.optimizer.eps=1.0e-5",
        f"actor.microbatch_budget_tokens={names['part']}",
    ]
    changed = [word.replace("{all}", str(names["all"])).replace("{part}", str(names["part"])) for word in overrides]
    key = (switch.model, *changed)
    if key not in cache:
        folder = model_folder(place, switch.model)
        path = write_settings(place, settings(place, folder, size, dtype))
        update = _in_own_process if switch.own_process else updated
        cache[key] = update(place, size, folder, path, [*ACTOR_ONLY, *common, *changed])
    return cache[key]


def updated(place: Place, size: Size, folder: Path, path: Path, overrides: list[str]) -> Side:
    """Update the model once for its numbers, then measure the speed."""
    config = resolve_for_device(load_config(path, overrides))
    with trainer(config) as t:
        logprob, changes = numbers(t, size, folder)
        speed = update_speed(place, t, size, folder, 1 if place.tiny else 3)
    accelerations = find_accelerations(config.model.accelerations)
    empty_cache()
    return Side(logprob, changes, speed, accelerations.sentence(DTYPES[config.model.dtype]))


def _in_own_process(place: Place, size: Size, folder: Path, path: Path, overrides: list[str]) -> Side:
    """Run the update in a separate process. Raises RuntimeError with the end of the error output if the process
    fails."""
    common, out = Path(place.scratch) / "side.json", Path(place.scratch) / "side.pt"
    out.unlink(missing_ok=True)
    arguments = {"place": asdict(place), "size": asdict(size), "folder": str(folder), "path": str(path)}
    common.write_text(json.dumps({**arguments, "overrides": overrides}))
    program = [sys.executable, "-m", "tests.gpu.acceptance.switch_side", str(common), str(out)]
    done = subprocess.run(program, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=_SIDE_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-300:])
    accelerations = torch.load(out, weights_only=True)
    return Side(**{**accelerations, "speed": Speed(**accelerations["speed"])})


def numbers(t: Trainer, size: Size, folder: Path) -> tuple[Tensor, list[Tensor]]:
    """Return the log-probabilities before an update, and the changes of each parameter."""
    rollout, scores_B = rollouts(samples(size, folder, ragged=True))
    before = t.parts.actor.copy_weights()
    t.step = 1
    placed, scored = t.forward(rollout, scores_B)
    t.update_actor(placed, t.estimate_advantages(scored))
    after = t.parts.actor.copy_weights()
    changes = [(a.float() - b.float()) for a, b in zip(after, before, strict=True)]
    return scored.old_logprob_BR[rollout.response_mask_BR], changes
