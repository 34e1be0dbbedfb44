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
from megappo.config.renamed import replace_old_names
from megappo.config.sections.engine import DEFAULT_ENGINE
from megappo.errors import RunError, first_of
from megappo.megatron.local_shards import LocalShard
from megappo.megatron.placed import announce, place
from megappo.megatron.roles import Role
from megappo.plugins import is_import_path
from megappo.ppo.assembly.methods import find_objective
from megappo.ppo.assembly.models import ModelBuilder
from megappo.ppo.assembly.start import run_steps
from megappo.ppo.records.checkpoints import outcome_text
from megappo.ppo.updates import LossWeights, PolicyTask, ValueTask
from megappo.runtime.process import Runtime, start_runtime
from megappo.runtime.ranks.objects import all_gather_objects
from megappo.types import Samples

_SHOWN = 8


class ReplayError(RunError):
    """A repeated update differs from the refused update."""


T = TypeVar("T", int, str)


def replay(path: str, world_size: int) -> None:
    """Repeat the refused update in a folder of `<run directory>/replay`, and print its result.

    The output lists samples and gradients with non-finite numbers. Every rank calls this function and loads its part
    of the batch. Raises ValueError if the folder is damaged or was written by another number of ranks. Raises
    ReplayError if the update differs. Code in the folder, or named by the folder, is not run.
    """
    folder = Path(path)
    try:
        marker = read_marker(folder)
    except DamagedError as error:
        raise ValueError(f"{folder} cannot be replayed: {error}; name a folder in a run's `replay`") from error
    if "weights" not in marker.content.get("refused", ()):
        raise ValueError(f"{folder} has no batch that this version can repeat; name a folder in a run's `replay`")
    if marker.content["world_size"] != world_size:
        raise ValueError(
            f"{folder} was written by {marker.content['world_size']} ranks, but there are {world_size}; use "
            "the same number"
        )
    require_readable(folder, marker)
    settings, _ = replace_old_names(marker.content["settings"])
    settings["run"] |= {"steps": run_steps(marker), "epochs": None}
    # A replay generates no responses.
    settings["rollout"] |= {"engine": DEFAULT_ENGINE, "servers": None, "ahead": 0, "max_lag": None}
    settings["model"]["trust_remote_code"] = False  # the folder may be untrusted
    loss = settings["algorithm"]["policy_loss"]
    of_users = {"model.family": settings["model"].get("family"), "algorithm.policy_loss": loss}
    for key, name in of_users.items():
        if name is not None and is_import_path(name):
            raise ValueError(
                f"{folder} uses {key} '{name}', code that a replay does not import because the folder names it; "
                "continue the run from its checkpoint, which repeats the update"
            )
    config = Config.model_validate(settings)
    with start_runtime(config.runtime) as runtime:
        problems = shared_problems(folder, marker, runtime)
        if problems:
            raise ValueError(f"{folder} is damaged: {first_of(problems, 3, '; ')}; it cannot be replayed")
        derived = derive_run(config, world_size)
        trained = [name for name in ("actor", "critic") if name in marker.content["updates"]]  # trained roles only
        stops = tuple(marker.content["refused"].get("stop_token_ids", ()))
        models = ModelBuilder(config, derived, runtime, roles=trained, resumed=True, stop_token_ids=stops)
        built = (models.actor() if "actor" in trained else None, models.critic() if "critic" in trained else None)
        roles = [role for role in built if role is not None]
        lines = _repeat(config, roles, runtime, folder, marker)
        if runtime.is_main:
            print("\n".join(lines))


def _repeat(config: Config, roles: Sequence[Role], runtime: Runtime, folder: Path, marker: Marker) -> list[str]:
    """Repeat the update, and return the lines to print."""
    refusal = marker.content["refused"]
    load_shards(folder, roles, marker.content["updates"])
    role = next(role for role in roles if role.placement.name == refusal["role"])
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
    update = placed.update(0, _task(refusal, config))
    gradients = _everywhere(_nonfinite_gradients(role))
    strange_outputs = _everywhere(_nonfinite(samples, [placed.forward()]))
    strange_inputs = _everywhere(_nonfinite(samples, batch["fields_BR"].values()))
    numbers = outcome_text(update)
    different = [f"{n} {numbers[n]}, then {before}" for n, before in refusal["outcome"].items() if numbers[n] != before]
    if different:
        raise ReplayError(f"the update differs from the update in the run: {first_of(different, _SHOWN, '; ')}")
    return [
        f"step {marker.step}, {refusal['role']}, minibatch {refusal['number'] + 1}: "
        "refused again, all numbers as in the run",
        *(f"  {name} {text}" for name, text in numbers.items()),
        f"samples with inputs of the loss that are not finite: {_listed(strange_inputs)}",
        f"samples for which the model's output is not finite: {_listed(strange_outputs)}",
        f"parameters with gradients that are not finite: {_listed(gradients)}",
    ]


def _task(refusal: dict[str, Any], config: Config) -> PolicyTask | ValueTask:
    weights = LossWeights(**refusal["weights"])
    if refusal["role"] == "actor":
        return PolicyTask(find_objective(config.algorithm, refusal["penalty_coef"]), weights)
    assert config.critic is not None
    return ValueTask(config.critic.value_clip, weights)


def _nonfinite(samples: Samples, tensors_BR: Collection[Tensor]) -> list[int]:
    """Return the ids of samples with a non-finite number at a response token."""
    of_each = zip(samples.sample_ids_B.tolist(), samples.response_lengths_B.tolist(), strict=True)
    return [
        i for b, (i, n) in enumerate(of_each) if not all(bool(torch.isfinite(x_BR[b, :n]).all()) for x_BR in tensors_BR)
    ]


def _nonfinite_gradients(role: Role) -> list[str]:
    shards: list[tuple[LocalShard, Any]] = [(shard, shard.parameter) for shard in role.trained_parameters()]
    return [
        shard.entry.megatron
        for shard, parameter in shards
        if not torch.isfinite(shard.part_of(parameter.main_grad)).all()
    ]


def _everywhere(items: list[T]) -> list[T]:
    """Return the distinct items of all ranks. A collective of the world."""
    return sorted({item for part in all_gather_objects(items) for item in part})


def _listed(items: Sequence[int | str]) -> str:
    return first_of(items, _SHOWN) or "none"
