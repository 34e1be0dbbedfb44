"""Checks of what the settings need of this machine: the models on its disk, and memory for the roles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megappo.config import Config
from megappo.config.hub import HubName
from megappo.config.model_files import model_folder, model_paths
from megappo.doctor.findings import Finding, broken, fine, slow
from megappo.plan.here import this_machine
from megappo.plan.inputs import Models
from megappo.plan.planner import make_plan
from megappo.plan.search import remedy


def settings_findings(config: Config, models: Models, world_size: int) -> Iterator[Finding]:
    """The model's files, and memory for every role on its ranks."""
    for path in dict.fromkeys(model_paths(config).values()):
        yield _model(path)
    if config.reward.model_path is not None:
        yield _reward_model(config.reward.model_path, config)
    yield _room(config, models, world_size)


def _reward_model(path: str, config: Config) -> Finding:
    """Whether a folder is a reward model's, and who holds it."""
    from megappo.rewards.model import check_folder

    try:
        folder = model_folder(path, weights=False, key="reward.model_path")
        check_folder(str(folder), trust_remote_code=config.model.trust_remote_code)
    except ValueError as error:
        return broken("reward", *str(error).rsplit("; ", 1))
    return fine("reward", f"{path}, which {config.reward.model_holder}")


def _model(path: str) -> Finding:
    """Whether a model is on this machine."""
    if Path(path).is_dir():
        return fine("model", f"{path} is a folder here")
    from huggingface_hub import try_to_load_from_cache

    name = HubName.of(path)
    if isinstance(try_to_load_from_cache(name.repository, "config.json", revision=name.revision), str):
        return fine("model", f"{path} is in the cache of the hub")
    words = f"{path} is not on this machine; a run will fetch it"
    remedy = f"fetch it before ({name.download_command}), or set model.path to a folder of all machines"
    return slow("model", words, remedy)


def _room(config: Config, models: Models, world_size: int) -> Finding:
    """The plan of the run on this machine's devices."""
    machine = this_machine()
    plan = make_plan(config, models, machine, world_size)
    if plan.fits:
        return fine("room", f"{world_size} x {machine.summary}: {plan.verdict}")
    return broken("room", plan.verdict, remedy(config, models, machine, world_size)[0])
