"""A plan: memory on every rank, seconds of every stage, whether it fits and what it waits for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megappo.config import Config, ConfigError, derive, resolve
from megappo.config.base import LARGEST_WORLD
from megappo.config.chat_template import template_in, thinking_notes
from megappo.config.grid import rank_words
from megappo.config.hub import HubName
from megappo.config.model_files import load_architectures, tokenizer_folder
from megappo.config.shipped import shipped_file
from megappo.plan.cache import check_cache
from megappo.plan.costs import StageCost, step_costs, step_seconds
from megappo.plan.inputs import Models, make_setup
from megappo.plan.machine_file import find_machine
from megappo.plan.machines import ASSUMED, MACHINES, Machine
from megappo.plan.memory import RankMemory, rank_memory
from megappo.plan.rewards import RewardServerMemory, reward_server_memory
from megappo.plan.sizes import size_words
from megappo.plan.stopping import Stopping, stopping
from megappo.plan.sync import misplaced_server

_BOUND_WORDS = {
    "compute": "arithmetic",
    "memory": "memory bandwidth",
    "launches": "kernel launches",
    "links": "communication",
    "host": "the link to the host's memory",
    "waking": "servers that wake",
}


@dataclass(frozen=True)
class Plan:
    """The plan of a configuration on a machine."""

    name: str
    """Name of the run (`run.name`)."""
    model: str
    machine: str
    gpus: int
    """Devices of the trainers."""
    server_gpus: int
    """Devices that servers have to themselves."""
    fits: bool
    usable_bytes: float
    """Memory of a device that a plan may fill."""
    ranks: tuple[RankMemory, ...]
    stages: tuple[StageCost, ...]
    step_seconds: float
    tokens_per_second: float
    """Prompt and response tokens of the step by its seconds, all ranks."""
    stopping: Stopping
    """Lead time for a scheduler, and how often to write a checkpoint."""
    verdict: str
    """Whether it fits, and where it is fullest."""
    bottleneck: str
    assumptions: str
    reward_servers: tuple[RewardServerMemory, ...] = ()
    """Servers of rewards, on devices of their own; without CUDA they are counted in each rank's `reward`."""

    @property
    def fullest(self) -> RankMemory:
        """The ranks with the highest peak."""
        return max(self.ranks, key=lambda ranks: ranks.peak)

    @property
    def fullest_trainers(self) -> RankMemory:
        """The trainer ranks with the highest peak."""
        return max((r for r in self.ranks if not r.of_servers), key=lambda ranks: ranks.peak)


@dataclass(frozen=True)
class PlannedModels:
    """Architectures of a configuration's models and where they were read."""

    models: Models
    notes: tuple[str, ...]


def read_models(config: Config, beside: Path | None) -> PlannedModels:
    """Architectures from the models' config.json: no weights, no tokenizer.

    With `beside`, a folder that is not on this machine, or a hub name, is read from `beside`/NAME, or from
    configs/models/NAME, where that holds a config.json, NAME being the last part of the path, without a revision.
    Raises ConfigError for a model that is found nowhere or not supported.
    """
    notes: list[str] = []

    def where(path: str) -> str:
        if beside is None:
            return path
        name = Path(HubName.of(path).repository).name
        known = (folder / name for folder in (beside, shipped_file("configs", "models")))
        local = next((folder for folder in known if (folder / "config.json").is_file()), None)
        if Path(path).exists() or local is None:
            return path
        notes.append(f"{path} is planned from {local / 'config.json'}")
        return str(local)

    found = load_architectures(config, where)
    actor = found["actor"]
    models = Models(actor, found.get("critic", actor), found.get("reference", actor))
    return PlannedModels(models, tuple(dict.fromkeys(notes)))


def models_beside(configuration: str | os.PathLike[str]) -> Path:
    """The folder in which `read_models` looks for models that are not on this machine: `models` beside the
    configuration file, or one folder higher."""
    here = Path(configuration).parent
    return next((folder for folder in (here / "models", here / ".." / "models") if folder.is_dir()), here / "models")


def default_machine(config: Config) -> Machine:
    """The machine of a plan that names none: the CPU where the settings ask for it, an H100 otherwise."""
    return MACHINES["cpu" if config.runtime.device == "cpu" else "h100"]


def fewest_ranks(config: Config, *, on_cuda: bool = False) -> int:
    """The fewest ranks on which the layouts of a configuration stand, and with CUDA a server that shares their
    devices."""
    open_sizes, ends = [], []
    for layout in (settings.layout for settings in config.trained.values()):
        size = layout.grid(LARGEST_WORLD).model_ranks
        ends.append(layout.first_rank + (layout.ranks or size))
        if layout.ranks is None:
            open_sizes.append((layout.first_rank, size))
    servers = config.rollout.servers
    if on_cuda and resolve(config, on_cuda=True).rollout.has_servers and servers.placement == "colocated":
        ends.append(servers.tensor_parallel)
    for world in range(max(ends), LARGEST_WORLD):
        if all((world - first) % size == 0 for first, size in open_sizes):
            return world
    return min(max(ends), LARGEST_WORLD)  # `derive` then refuses what does not fit


@dataclass(frozen=True)
class Planning:
    """The subject of a plan: a configuration on so many devices of a machine."""

    config: Config
    models: Models
    machine: Machine
    gpus: int
    notes: tuple[str, ...]
    """Notes for the user: from where models were read that are not on this machine, and settings that are unwise."""

    @property
    def plan(self) -> Plan:
        """The plan of this configuration. Raises as `make_plan` does."""
        return make_plan(self.config, self.models, self.machine, self.gpus)


def planning(
    config: Config,
    machine: str | os.PathLike[str] | None = None,
    gpus: int | None = None,
    beside: str | os.PathLike[str] | None = None,
) -> Planning:
    """The subject of a plan, with defaults for arguments that are None: the machine of `runtime.device`, the fewest
    devices that the layouts need, and models only from where the configuration says. Raises ConfigError as
    `find_machine` and `read_models` do, and for a number of devices that no run has."""
    if gpus is not None and not 1 <= gpus <= LARGEST_WORLD:
        raise ConfigError(f"gpus is {gpus}, must be a whole number from 1 to {LARGEST_WORLD}; give fewer or more")
    named = default_machine(config) if machine is None else find_machine(os.fspath(machine))
    found = read_models(config, None if beside is None else Path(beside))
    notes = (*found.notes, *thinking_notes(config, _template(config, known=not found.notes)))
    return Planning(
        config, found.models, named, fewest_ranks(config, on_cuda=named.is_cuda) if gpus is None else gpus, notes
    )


def _template(config: Config, *, known: bool) -> str:
    """The chat template of the tokenizer; "" where its folder is not on this machine. `known`: all models are."""
    place = config.model.tokenizer or config.model.path
    is_here = Path(place).is_dir() or (known and config.model.tokenizer is None)
    return template_in(tokenizer_folder(config.model)) if is_here else ""


def make_plan(config: Config, models: Models, machine: Machine, gpus: int) -> Plan:
    """Plan a configuration on so many devices. Raises ConfigError where its rules do not hold on that world, and where
    a server has no room for the longest sequence."""
    config = resolve(config, on_cuda=machine.is_cuda)
    derive(config, gpus, models.actor, models.critic, models.reference)
    share = machine.per_rank(gpus)
    setup = make_setup(config, models, gpus, on_cuda=machine.is_cuda, device_bytes=share.memory_bytes)
    if setup.work.servers is not None:
        if (problem := misplaced_server(setup, machine.devices_per_node)) is not None:
            raise ConfigError(problem)
        check_cache(setup.actor.arch, setup.work, config.rollout.servers.memory_fraction)
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
    whose = " of the servers" if fullest.of_servers else ""
    return (
        f"{'fits' if fits else 'does not fit'}: {rank_words(fullest.ranks)}{whose} {needs} "
        f"{size_words(fullest.peak)} in {fullest.peak_stage}, {size_words(usable_bytes)} are usable"
    )


def _bottleneck(stages: tuple[StageCost, ...], seconds: float) -> str:
    longest = max(stages, key=lambda stage: stage.seconds)
    return (
        f"{longest.name} takes {longest.seconds / seconds:.0%} of the predicted {seconds:.3g} seconds of a step, "
        f"bound by {_BOUND_WORDS[longest.bound_by]}"
    )
