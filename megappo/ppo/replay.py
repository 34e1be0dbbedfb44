"""Repeats an update that was refused because its loss or gradient was not finite."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megappo.checkpoint.files import DamagedError, Marker, read_marker
from megappo.checkpoint.reader import load_values
from megappo.checkpoint.select import shared_problems
from megappo.checkpoint.shards import load_shards
from megappo.checkpoint.versions import require_readable
from megappo.config import Config, derive_run
from megappo.errors import RunError, first_of
from megappo.megatron.local_shards import LocalShard
from megappo.megatron.placed import announce, place
from megappo.megatron.roles import Role
from megappo.plugins import is_import_path
from megappo.ppo.checkpoints import outcome_text
from megappo.ppo.methods import find_objective
from megappo.ppo.models import ModelBuilder
from megappo.ppo.start import run_steps
from megappo.ppo.updates import LossWeights, PolicyTask, ValueTask
from megappo.runtime.objects import all_gather_objects
from megappo.runtime.process import Runtime, start_runtime
from megappo.types import Samples

_SHOWN = 8


class ReplayError(RunError):
    """A repeated update differs from the one that was refused."""


T = TypeVar("T", int, str)


def replay(path: str, world_size: int) -> None:
    """Repeat the refused update in a folder of `<run directory>/replay`, and print its result and which samples and
    gradients are not finite; every rank calls this and loads its part of the batch.

    Raises ValueError where the folder is damaged or was written by another number of ranks, ReplayError where the
    update differs. No code that the folder contains or names is run.
    """
    folder = Path(path)
    try:
        marker = read_marker(folder)
    except DamagedError as error:
        raise ValueError(f"{folder} cannot be replayed: {error}; name a folder in a run's `replay`") from error
    if "weights" not in marker.content.get("refused", ()):
        raise ValueError(f"{folder} holds no batch that this version repeats; name a folder in a run's `replay`")
    if marker.content["world_size"] != world_size:
        raise ValueError(
            f"{folder} was written by {marker.content['world_size']} ranks, there are {world_size}; start as many"
        )
    require_readable(folder, marker)
    settings = marker.content["settings"]
    settings["run"] |= {"steps": run_steps(marker), "epochs": None}
    # Nothing is generated.
    settings["rollout"] |= {"engine": "transformers", "sglang": None, "ahead": 0, "max_lag": None}
    settings["model"]["trust_remote_code"] = False  # the folder may be somebody else's
    loss = settings["algorithm"]["policy_loss"]
    of_users = {"model.family": settings["model"].get("family"), "algorithm.policy_loss": loss}
    for key, name in of_users.items():
        if name is not None and is_import_path(name):
            raise ValueError(
                f"{folder} is of {key} '{name}', code that a replay does not import because its folder names it; "
                "continue the run from its checkpoint, which repeats the update"
            )
    config = Config.model_validate(settings)
    with start_runtime(config.runtime) as runtime:
        found = shared_problems(folder, marker, runtime)
        if found:
            raise ValueError(f"{folder} is damaged: {first_of(found, 3, '; ')}; it cannot be replayed")
        derived = derive_run(config, world_size)
        there = [name for name in ("actor", "critic") if name in marker.content["updates"]]  # of those that are trained
        stops = tuple(marker.content["refused"].get("stop_token_ids", ()))
        models = ModelBuilder(config, derived, runtime, roles=there, resumed=True, stop_token_ids=stops)
        built = (models.actor() if "actor" in there else None, models.critic() if "critic" in there else None)
        roles = [role for role in built if role is not None]
        lines = _repeat(config, roles, runtime, folder, marker)
        if runtime.is_main:
            print("\n".join(lines))


def _repeat(config: Config, roles: Sequence[Role], runtime: Runtime, folder: Path, marker: Marker) -> list[str]:
    """Repeat the update; returns the lines to print."""
    kept = marker.content["refused"]
    load_shards(folder, roles, marker.content["updates"])
    role = next(role for role in roles if role.placement.name == kept["role"])
    batch = load_values(folder / f"batch-{runtime.rank:05d}.pt")
    routing, marks = batch.get("routing"), batch.get("below_minimum")
    samples = Samples(
        batch["sample_ids_B"],
        tuple(batch["sequences"]),
        batch["response_lengths_B"],
        routing=None if routing is None else tuple(routing),
        below_minimum=None if marks is None else tuple(marks),
    )
    announced = announce(samples, runtime.device)
    placed = place(role, announced, [frozenset(announced.homes)]).with_fields(batch["fields_BR"])
    update = placed.update(0, _task(kept, config))
    gradients = _everywhere(_nonfinite_gradients(role))
    strange_outputs = _everywhere(_nonfinite(samples, [placed.forward()]))
    strange_inputs = _everywhere(_nonfinite(samples, batch["fields_BR"].values()))
    numbers = outcome_text(update)
    different = [f"{n} {numbers[n]}, then {before}" for n, before in kept["outcome"].items() if numbers[n] != before]
    if different:
        raise ReplayError(f"the update did not come out as it did in the run: {first_of(different, _SHOWN, '; ')}")
    return [
        f"step {marker.step}, {kept['role']}, minibatch {kept['number'] + 1}: refused again, all numbers as in the run",
        *(f"  {name} {text}" for name, text in numbers.items()),
        f"samples with inputs of the loss that are not finite: {_listed(strange_inputs)}",
        f"samples for which the model's output is not finite: {_listed(strange_outputs)}",
        f"parameters with gradients that are not finite: {_listed(gradients)}",
    ]


def _task(kept: dict[str, Any], config: Config) -> PolicyTask | ValueTask:
    weights = LossWeights(**kept["weights"])
    if kept["role"] == "actor":
        return PolicyTask(find_objective(config.algorithm, kept["penalty_coef"]), weights)
    assert config.critic is not None
    return ValueTask(config.critic.value_clip, weights)


def _nonfinite(samples: Samples, tensors_BR: Collection[Tensor]) -> list[int]:
    """Ids of samples with a number that is not finite at one of their response tokens."""
    of_each = zip(samples.sample_ids_B.tolist(), samples.response_lengths_B.tolist(), strict=True)
    return [
        i for b, (i, n) in enumerate(of_each) if not all(bool(torch.isfinite(x_BR[b, :n]).all()) for x_BR in tensors_BR)
    ]


def _nonfinite_gradients(role: Role) -> list[str]:
    here: list[tuple[LocalShard, Any]] = [(held, held.parameter) for held in role.trained_parameters()]
    return [
        held.entry.megatron for held, parameter in here if not torch.isfinite(held.part_of(parameter.main_grad)).all()
    ]


def _everywhere(found: list[T]) -> list[T]:
    """Items that any rank found, without repetitions; a collective of the world."""
    return sorted({item for part in all_gather_objects(found) for item in part})


def _listed(found: Sequence[int | str]) -> str:
    return first_of(found, _SHOWN) or "none"
