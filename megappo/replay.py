"""Repeats an update that was refused because its loss or gradient was not finite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megappo.assembly import trained_roles
from megappo.checkpoint import (
    DamagedError,
    Marker,
    load_shards,
    load_values,
    read_marker,
    require_readable,
    shared_problems,
)
from megappo.config import Config, derive_run
from megappo.errors import RunError
from megappo.models.roles import TrainedRole, Update
from megappo.models.updates import task_again
from megappo.resume import outcome_text, run_steps
from megappo.runtime import Runtime, start_runtime
from megappo.runtime.exchange import Row

_SHOWN = 8


class ReplayError(RunError):
    """The update came out differently."""


def replay(path: str, world_size: int) -> None:
    """Load the models and this rank's part of the batch from a folder in `<run directory>/replay`, repeat the update
    and print what came of it, which samples and which gradients are not finite; every rank calls this.

    Raises ValueError where the folder is damaged or was written by another number of ranks, ReplayError where the
    update came out differently. No code that the folder holds or names is run.
    """
    folder = Path(path)
    try:
        marker = read_marker(folder)
    except DamagedError as error:
        raise ValueError(f"{folder} cannot be replayed: {error}; name a folder in a run's `replay`") from error
    kept = marker.content.get("refused")
    if kept is None:
        raise ValueError(f"{folder} is a checkpoint without a batch; name a folder in a run's `replay`")
    if marker.content["world_size"] != world_size:
        raise ValueError(
            f"{folder} was written by {marker.content['world_size']} ranks, there are {world_size}; start as many"
        )
    require_readable(folder, marker)
    settings = marker.content["settings"]
    settings["run"] |= {"steps": run_steps(marker), "epochs": None}
    settings["rollout"] |= {"engine": "transformers", "sglang": None, "ahead": 0}  # nothing is generated
    settings["model"]["trust_remote_code"] = False  # the folder may be somebody else's, and no family needs it
    config = Config.model_validate(settings)
    with start_runtime(config.runtime) as runtime:
        found = shared_problems(folder, marker, runtime)
        if found:
            raise ValueError(f"{folder} is damaged: {'; '.join(found[:3])}; it cannot be replayed")
        roles = trained_roles(config, derive_run(config, world_size), runtime)
        lines = _repeat(config, roles, runtime, folder, marker)
        if runtime.is_main:
            print("\n".join(lines))


def _repeat(config: Config, roles: Sequence[TrainedRole], runtime: Runtime, folder: Path, marker: Marker) -> list[str]:
    """The update again, and what to print of it."""
    kept = marker.content["refused"]
    load_shards(folder, roles, marker.content["updates"], runtime)
    role = next(role for role in roles if role.placement.name == kept["role"])
    rows = _rows(folder / f"batch-{runtime.rank:05d}.pt")
    task = task_again(kept["role"], kept["names"], kept["penalty_coef"], config.algorithm, config.critic)
    outcome: list[Update | None] = [role.update_minibatch(rows, task)]
    gradients = _everywhere(_nonfinite_gradients(role))
    outputs = role.score([Row(r.sample_id, r.integers, torch.zeros(1, r.floats.shape[1])) for r in rows])
    strange_outputs = _everywhere([i for i, output in outputs.items() if not bool(torch.isfinite(output).all())])
    strange_inputs = _everywhere([r.sample_id for r in rows if not bool(torch.isfinite(r.floats).all())])
    dist.broadcast_object_list(outcome, src=role.placement.grid.ranks[0])
    assert outcome[0] is not None
    numbers = outcome_text(outcome[0])
    different = [f"{n} {numbers[n]}, then {before}" for n, before in kept["outcome"].items() if numbers[n] != before]
    if different:
        raise ReplayError(f"the update did not come out as it did in the run: {'; '.join(different[:_SHOWN])}")
    return [
        f"step {marker.step}, {kept['role']}, minibatch {kept['number'] + 1}: refused again, all numbers as in the run",
        *(f"  {name} {text}" for name, text in numbers.items()),
        f"samples with inputs of the loss that are not finite: {_listed(strange_inputs)}",
        f"samples for which the model's output is not finite: {_listed(strange_outputs)}",
        f"parameters with gradients that are not finite: {_listed(gradients)}",
    ]


def _rows(path: Path) -> list[Row]:
    batch = load_values(path)
    return [Row(*parts) for parts in zip(batch["sample_ids"], batch["integers"], batch["floats"], strict=True)]


def _nonfinite_gradients(role: TrainedRole) -> list[str]:
    if role.model is None:
        return []
    here: list[tuple[Any, Any]] = role.model.parameters_here()
    return [entry.megatron for entry, parameter in here if not bool(torch.isfinite(parameter.main_grad).all())]


def _everywhere(found: list[Any]) -> list[Any]:
    """What any rank found, without repetitions; a collective of the world."""
    gathered: list[list[Any]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, found)
    return sorted({item for part in gathered for item in part})


def _listed(found: list[Any]) -> str:
    if not found:
        return "none"
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(map(str, found[:_SHOWN])) + more
