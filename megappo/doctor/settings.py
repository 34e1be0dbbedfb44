"""Checks of the requirements of the settings: the files of the models, the reward model, and memory for the roles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megappo.config import Config, ConfigError
from megappo.config.role_models import load_architecture, model_paths
from megappo.doctor.findings import Finding, broken, fine, from_sentence, slow, until_refused
from megappo.models.hub import HubName
from megappo.models.model_files import model_folder
from megappo.plan.bytes.rewards import reward_parameters
from megappo.plan.hardware.machines import Machine
from megappo.plan.here import this_machine
from megappo.plan.inputs import Models
from megappo.plan.planner import make_plan
from megappo.plan.search import remedy
from megappo.reshard.sources import SafetensorsSource


def settings_findings(config: Config, models: Models, world_size: int) -> Iterator[Finding]:
    """Yield findings on the files of all models, and on the memory for every role on its ranks of this machine."""
    yield from until_refused("weights", weight_findings(config))
    yield from until_refused("reward", reward_model_findings(config))
    machine = this_machine()
    yield fit_finding(config, models, machine, world_size, f"{world_size} x {machine.summary}")


def weight_findings(config: Config) -> Iterator[Finding]:
    """Check that the files contain every tensor of every model by reading their headers. Raises ValueError if a tensor
    is missing."""
    for role, path in model_paths(config).items():
        if config.model.init == "random":
            yield fine("weights", f"{role}: initialised from the seed; model.init is random")
        elif not Path(path).is_dir():
            yield _of_hub(role, path)
        else:
            arch = load_architecture(Path(path), config.model)
            source = SafetensorsSource(Path(path), arch)
            count = source.check(with_output_layer=role != "critic")
            kind = "float8" if arch.stored_blocks else "MXFP4" if arch.stored_mxfp4 else ""
            stored = f" and {kind} weights have their scales" if kind else ""
            if role == "actor" and source.mtp_shapes:
                stored += f"; {len(source.mtp_shapes)} of layers for multi-token prediction are kept for exports"
            yield fine(
                "weights", f"{role}: all {count} tensors are in {path}, in the shapes of its config.json{stored}"
            )


def _of_hub(role: str, path: str) -> Finding:
    """Return a finding on whether a model of the hub is on this machine."""
    from huggingface_hub import try_to_load_from_cache

    name = HubName.of(path)
    if isinstance(try_to_load_from_cache(name.repository, "config.json", revision=name.revision), str):
        return fine("weights", f"{role}: {path} is in the cache of the hub")
    text = f"{role}: {path} is not on this machine; a run will fetch it"
    remedy = f"fetch it before the run ({name.download_command}), or set model.path to a folder on all machines"
    return slow("weights", text, remedy)


def reward_model_findings(config: Config) -> Iterator[Finding]:
    """Yield a finding on the folder of the reward model and on the processes that load the model. Yield nothing if
    there is no reward model. Raises ValueError if the folder does not contain a reward model."""
    path = config.reward.model_path
    if path is None:
        return
    from megappo.rewards.model import check_folder

    folder = model_folder(path, weights=False, key="reward.model_path")
    check_folder(str(folder), trust_remote_code=config.model.trust_remote_code)
    count = reward_parameters(path)
    yield fine("reward", f"the model in {path}, {count:,} weights, which {config.reward.model_holder}")


def fit_finding(config: Config, models: Models, machine: Machine, ranks: int, where: str) -> Finding:
    """Return a finding on whether the run fits on the ranks of a machine. `where` describes the machine."""
    try:
        plan = make_plan(config, models, machine, ranks)
    except ConfigError as error:
        return from_sentence("plan", "broken", f"{where}: does not fit: {error}")
    text = f"{where}: {plan.verdict}"
    return fine("plan", text) if plan.fits else broken("plan", text, remedy(config, models, machine, ranks)[0])
