"""Plan of a run: memory on every rank, seconds of every stage, whether the run fits, and its bottleneck."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megappo.config import Config, ConfigError, derive, resolve
from megappo.config.base import LARGEST_WORLD
from megappo.config.grid import format_rank_list
from megappo.config.role_models import load_architectures, tokenizer_folder
from megappo.config.shipped import shipped_file
from megappo.config.templates import thinking_notes
from megappo.models.chat_template import template_in
from megappo.models.hub import HubName
from megappo.plan.bytes.cache import check_cache
from megappo.plan.bytes.memory import RankMemory, rank_memory
from megappo.plan.bytes.rewards import RewardServerMemory, reward_server_memory
from megappo.plan.bytes.sizes import format_size
from megappo.plan.costs import StageCost, step_costs, step_seconds
from megappo.plan.hardware.machine_file import find_machine
from megappo.plan.hardware.machines import ASSUMED, MACHINES, Machine
from megappo.plan.inputs import Models, make_setup
from megappo.plan.stopping import Stopping, stopping
from megappo.plan.sync import misplaced_server

_BOUND_NAMES = {
    "compute": "arithmetic",
    "memory": "memory bandwidth",
    "launches": "kernel launches",
    "links": "communication",
    "host": "the link to the host's memory",
    "waking": "waking servers",
}


@dataclass(frozen=True)
class Plan:
    """Plan of a configuration on a machine."""

    name: str
    """Name of the run (`run.name`)."""
    model: str
    machine: str
    gpus: int
    """Number of trainer devices."""
    server_gpus: int
    """Number of devices that are used only by servers."""
    fits: bool
    usable_bytes: float
    """Memory of a device in bytes that the plan may fill."""
    ranks: tuple[RankMemory, ...]
    stages: tuple[StageCost, ...]
    step_seconds: float
    tokens_per_second: float
    """Prompt and response tokens per second over all ranks."""
    stopping: Stopping
    """Lead time for a scheduler, and the recommended interval between checkpoints."""
    verdict: str
    """Sentence on whether the plan fits and on the ranks with the highest peak."""
    bottleneck: str
    assumptions: str
    reward_servers: tuple[RewardServerMemory, ...] = ()
    """Reward servers on separate devices. Without CUDA, their memory is part of each rank's `reward`."""

    @property
    def fullest(self) -> RankMemory:
        """Ranks with the highest peak."""
        return max(self.ranks, key=lambda ranks: ranks.peak)

    @property
    def fullest_trainers(self) -> RankMemory:
        """Trainer ranks with the highest peak."""
        return max((r for r in self.ranks if not r.of_servers), key=lambda ranks: ranks.peak)


@dataclass(frozen=True)
class PlannedModels:
    """Architectures of the models of a configuration, with notes on the files that were read."""

    models: Models
    notes: tuple[str, ...]


def read_models(config: Config, models_folder: Path | None) -> PlannedModels:
    """Return the architectures from the config.json of the models, without weights or tokenizer.

    With `models_folder`, a hub name or a folder that is not on this machine is read from `models_folder`/NAME or from
    configs/models/NAME if that folder has a config.json. NAME is the last part of the path without a revision. Raises
    ConfigError if a model is missing or not supported.
    """
    notes: list[str] = []

    def where(path: str) -> str:
        if models_folder is None:
            return path
        name = Path(HubName.of(path).repository).name
        known = (folder / name for folder in (models_folder, shipped_file("configs", "models")))
        local = next((folder for folder in known if (folder / "config.json").is_file()), None)
        if Path(path).exists() or local is None:
            return path
        notes.append(f"{path} is planned from {local / 'config.json'}")
        return str(local)

    architectures = load_architectures(config, where)
    actor = architectures["actor"]
    models = Models(actor, architectures.get("critic", actor), architectures.get("reference", actor))
    return PlannedModels(models, tuple(dict.fromkeys(notes)))


def local_models_folder(configuration: str | os.PathLike[str]) -> Path:
    """Return the folder in which `read_models` searches for models that are not on this machine. The folder is
    `models` next to the configuration file or one level above."""
    base = Path(configuration).parent
    return next((folder for folder in (base / "models", base / ".." / "models") if folder.is_dir()), base / "models")


def default_machine(config: Config) -> Machine:
    """Return the default machine of a plan: the CPU if `runtime.device` is cpu, otherwise an H100."""
    return MACHINES["cpu" if config.runtime.device == "cpu" else "h100"]


def fewest_ranks(config: Config, *, on_cuda: bool = False) -> int:
    """Return the fewest ranks for the layouts of a configuration. With CUDA, the ranks also provide enough devices for
    one colocated server."""
    open_sizes, ends = [], []
    for layout in (settings.layout for settings in config.trained.values()):
        size = layout.grid(LARGEST_WORLD).model_ranks
        ends.append(layout.first_rank + (layout.ranks or size))
        if layout.ranks is None:
            open_sizes.append((layout.first_rank, size))
    rollout = resolve(config, on_cuda=on_cuda).rollout
    if on_cuda and rollout.capabilities.separate_processes and not rollout.broadcasts:
        ends.append(rollout.server_settings.tensor_parallel)
    for world in range(max(ends), LARGEST_WORLD):
        if all((world - first) % size == 0 for first, size in open_sizes):
            return world
    return min(max(ends), LARGEST_WORLD)  # `derive` then rejects the layouts


@dataclass(frozen=True)
class Planning:
    """Subject of a plan: a configuration on a number of devices of a machine."""

    config: Config
    models: Models
    machine: Machine
    gpus: int
    notes: tuple[str, ...]
    """Notes for the user: sources of models that are not on this machine, and inadvisable settings."""

    @property
    def plan(self) -> Plan:
        """Plan of this configuration. Raises ConfigError as `make_plan` does."""
        return make_plan(self.config, self.models, self.machine, self.gpus)


def planning(
    config: Config,
    machine: str | os.PathLike[str] | None = None,
    gpus: int | None = None,
    models_folder: str | os.PathLike[str] | None = None,
) -> Planning:
    """Return the subject of a plan. Arguments that are None have defaults: the machine of `runtime.device`, the fewest
    devices that the layouts need, and the model paths of the configuration.

    Raises ConfigError as `find_machine` and `read_models` do, and for an invalid number of devices.
    """
    if gpus is not None and not 1 <= gpus <= LARGEST_WORLD:
        raise ConfigError(f"gpus is {gpus}, must be a whole number from 1 to {LARGEST_WORLD}; change the number")
    named = default_machine(config) if machine is None else find_machine(os.fspath(machine))
    loaded = read_models(config, None if models_folder is None else Path(models_folder))
    notes = (*loaded.notes, *thinking_notes(config, _template(config, known=not loaded.notes)))
    return Planning(
        config, loaded.models, named, fewest_ranks(config, on_cuda=named.is_cuda) if gpus is None else gpus, notes
    )


def _template(config: Config, *, known: bool) -> str:
    """Return the chat template of the tokenizer. Return "" if the folder of the tokenizer is not on this machine.
    `known` is true if all models are on this machine."""
    place = config.model.tokenizer or config.model.path
    is_local = Path(place).is_dir() or (known and config.model.tokenizer is None)
    return template_in(tokenizer_folder(config.model)) if is_local else ""


def make_plan(config: Config, models: Models, machine: Machine, gpus: int) -> Plan:
    """Plan a configuration on `gpus` devices. Raises ConfigError if a rule is broken for this number of devices or if
    a server has no room for the longest sequence."""
    config = resolve(config, on_cuda=machine.is_cuda)
    derive(config, gpus, models.actor, models.critic, models.reference)
    share = machine.per_rank(gpus)
    setup = make_setup(config, models, gpus, on_cuda=machine.is_cuda, device_bytes=share.memory_bytes)
    if setup.work.servers is not None:
        if (problem := misplaced_server(setup, machine.devices_per_node)) is not None:
            raise ConfigError(problem)
        if not config.rollout.is_custom:  # custom servers may have other caches
            check_cache(setup.actor.arch, setup.work, config.rollout.server_settings.memory_fraction)
    rewards = reward_server_memory(config.reward, share.memory_bytes, on_cuda=True) if machine.is_cuda else ()
    ranks, stages, servers = rank_memory(setup), step_costs(setup, share), setup.work.servers
    seconds = step_seconds(stages, servers)
    tokens = setup.work.batch_sequences * setup.work.sequence_tokens
    fullest = max(ranks, key=lambda r: r.peak)
    fits = fullest.peak <= share.usable_bytes
    return Plan(
        name=config.run.name,
        model=config.model.path,
        machine=machine.name,
        gpus=gpus,
        server_gpus=servers.own_ranks(gpus) if servers is not None else 0,
        fits=fits,
        usable_bytes=share.usable_bytes,
        ranks=ranks,
        stages=stages,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        stopping=stopping(setup, stages, share, seconds),
        verdict=_verdict(fullest, share.usable_bytes, fits),
        bottleneck=_bottleneck(stages, seconds),
        assumptions=ASSUMED.sentence(machine),
        reward_servers=rewards,
    )


def _verdict(fullest: RankMemory, usable_bytes: float, fits: bool) -> str:
    needs = "needs" if len(fullest.ranks) == 1 else "need"
    owner = " of the servers" if fullest.of_servers else ""
    return (
        f"{'fits' if fits else 'does not fit'}: {format_rank_list(fullest.ranks)}{owner} {needs} "
        f"{format_size(fullest.peak)} in {fullest.peak_stage}, {format_size(usable_bytes)} are usable"
    )


def _bottleneck(stages: tuple[StageCost, ...], seconds: float) -> str:
    longest = max(stages, key=lambda stage: stage.seconds)
    return (
        f"{longest.name} takes {longest.seconds / seconds:.0%} of the predicted {seconds:.3g} seconds of a step, "
        f"bound by {_BOUND_NAMES[longest.bound_by]}"
    )
