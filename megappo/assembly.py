"""Builds the parts of a run from its configuration: models on their layouts, engine, data, rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megappo.architecture import ArchitectureConfig
from megappo.checkpoint.identity import architecture_fields
from megappo.config import Config, ConfigError, Derived, RoleNumbers
from megappo.config.roles import TrainedRoleSettings
from megappo.data import Cursor, PromptDataset
from megappo.model_files import load_architecture, load_tokenizer, model_folder, model_paths
from megappo.models.build import DTYPES, BuildOptions, RoleModel, build_model
from megappo.models.layout import Grid, make_layout
from megappo.models.optimization import make_optimizer
from megappo.models.roles import Placement, Role, TrainedRole
from megappo.origins import open_origin
from megappo.reshard.sources import RandomSource, SafetensorsSource, WeightSource
from megappo.reshard.stream import WeightStream
from megappo.rewards.scorer import RewardScorer
from megappo.rollout import Engine, TransformersEngine, resolve_stop_token_ids
from megappo.runtime import Runtime
from megappo.runtime.interrupts import NeverStop, Stop
from megappo.runtime.sglang_cpu import require_sglang

ROLES = ("actor", "critic", "reference")


@dataclass(frozen=True)
class Parts:
    """Everything the trainer works with."""

    config: Config
    derived: Derived
    runtime: Runtime
    tokenizer: PreTrainedTokenizerBase
    architecture: ArchitectureConfig
    stop_token_ids: tuple[int, ...]
    train_prompts: PromptDataset
    cursor: Cursor
    validation_prompts: PromptDataset | None
    reward: RewardScorer
    engine: Engine
    actor: TrainedRole
    critic: TrainedRole | None
    reference: Role | None
    weights: WeightStream
    stop: Stop
    origins: tuple[str, ...] = ()
    """A sentence for each model that begins with other weights than those of its folder."""
    architectures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of actor and critic, as a checkpoint keeps them."""

    @property
    def trained(self) -> list[TrainedRole]:
        """Actor and critic, where there is one."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def close(self) -> None:
        """End worker processes and engines."""
        self.reward.close()
        self.engine.close()


def training_prompts(config: Config) -> PromptDataset:
    """The prompts to train on. Raises ValueError where data or tokenizer cannot be read."""
    return PromptDataset(config.data.train, config.data, load_tokenizer(config.model))


def assemble(
    config: Config,
    derived: Derived,
    runtime: Runtime,
    *,
    training: bool = True,
    prompts: PromptDataset | None = None,
    resumed: bool = False,
    stop: Stop | None = None,
) -> Parts:
    """Make every part; a collective of the whole world. Data and reward errors come before any model is built.

    Without `training` there is an actor to generate with, but no optimizer, critic or reference. `prompts` to train on,
    where they were read already. `resumed`: a checkpoint's weights come in the place of all that are built, so that
    what `start_from` names is not needed any more. `stop` says when to give up
    generating.
    """
    stop = stop if stop is not None else NeverStop()
    tokenizer = load_tokenizer(config.model)
    train_prompts = prompts if prompts is not None else PromptDataset(config.data.train, config.data, tokenizer)
    validation = config.data.validation if config.evaluation is not None or not training else None
    validation_prompts = PromptDataset(validation, config.data, tokenizer) if validation is not None else None
    reward = RewardScorer(config.reward, runtime.device)
    folder = model_folder(config.model.path)
    arch = load_architecture(folder, config.model.trust_remote_code)
    sources = weight_sources(config, ROLES if training else ("actor",))
    builder = _RoleBuilder(config, runtime, sources, resumed=resumed)
    actor_place, actor_model = builder.policy(folder, arch, config.actor, derived.actor)
    reference = None
    if config.reference is not None and training:
        reference_folder = model_folder(config.reference.path or config.model.path)
        reference = builder.reference(reference_folder, actor_place, derived.actor)
    if training:
        actor = builder.trained(actor_place, actor_model, config.actor, derived.actor)
    else:
        actor = TrainedRole(actor_place, actor_model, runtime, None)
    critic = None
    if config.critic is not None and derived.critic is not None and training:
        critic = builder.critic(model_folder(config.critic.path or config.model.path), derived.critic)
    weights = WeightStream(
        actor_place.grid,
        arch,
        actor_model,
        padded_vocab=derived.actor.padded_vocab_size,
        dtype=DTYPES[config.model.dtype],
        device=runtime.device,
        bucket_bytes=config.rollout.sync_bucket_bytes,
    )
    stop_token_ids = resolve_stop_token_ids(folder, tokenizer, config.rollout.stop_token_ids)
    return Parts(
        config=config,
        derived=derived,
        runtime=runtime,
        tokenizer=tokenizer,
        architecture=arch,
        stop_token_ids=stop_token_ids,
        train_prompts=train_prompts,
        cursor=Cursor(len(train_prompts), config.run.seed, config.data.shuffle, fingerprint=train_prompts.fingerprint),
        validation_prompts=validation_prompts,
        reward=reward,
        engine=_engine(config, runtime, folder, stop_token_ids, stop),
        actor=actor,
        critic=critic,
        reference=reference,
        weights=weights,
        origins=tuple(builder.origins),
        architectures=_architectures(config),
        stop=stop,
    )


def _architectures(config: Config) -> dict[str, dict[str, Any]]:
    paths = model_paths(config)
    folders = {role: model_folder(paths.get(role, config.model.path)) for role in ("actor", "critic")}
    return {
        role: architecture_fields(load_architecture(folder, config.model.trust_remote_code))
        for role, folder in folders.items()
        if role == "actor" or config.critic is not None
    }


def trained_roles(config: Config, derived: Derived, runtime: Runtime) -> list[TrainedRole]:
    """Actor and critic alone, for whoever neither generates nor scores; a collective of the whole world.

    No function or code that the settings name is imported, so they may be those of somebody else.
    """
    folder = model_folder(config.model.path)
    sources = weight_sources(config, ("actor", "critic"))
    builder = _RoleBuilder(config, runtime, sources, resumed=True)
    place, model = builder.policy(folder, load_architecture(folder, False), config.actor, derived.actor)
    roles = [builder.trained(place, model, config.actor, derived.actor)]
    if config.critic is not None and derived.critic is not None:
        roles.append(builder.critic(model_folder(config.critic.path or config.model.path), derived.critic))
    return roles


def _engine(config: Config, runtime: Runtime, folder: Path, stop_token_ids: tuple[int, ...], stop: Stop) -> Engine:
    if config.rollout.engine == "sglang":
        return _servers(config, runtime, folder, stop_token_ids, stop)
    return TransformersEngine(
        folder,
        dtype=DTYPES[config.rollout.dtype or config.model.dtype],
        device=runtime.device,
        generate_batch_sequences=config.rollout.generate_batch_sequences,
        trust_remote_code=config.model.trust_remote_code,
        stop=stop,
    )


def _servers(config: Config, runtime: Runtime, folder: Path, stop_token_ids: tuple[int, ...], stop: Stop) -> Engine:
    """SGLang, whose client needs packages that come with it."""
    require_sglang()
    from megappo.rollout.sglang import Fleet, ServerSpec, SGLangEngine

    sleep = config.rollout.servers_sleep(on_cuda=runtime.device.type == "cuda")
    spec = ServerSpec.of(config, folder, stop_token_ids, memory_saver=sleep)
    return SGLangEngine(Fleet(spec, runtime), config.rollout.servers, runtime, stop)


def weight_sources(config: Config, roles: Sequence[str]) -> Mapping[Path, WeightSource]:
    """The weights in each of these roles' folders, none with random weights.

    Every rank looks through the headers of all files before any model is built, so that all find the same mistake.
    """
    sources: dict[Path, SafetensorsSource] = {}
    if config.model.init == "random":
        return sources
    users: dict[Path, set[str]] = {}
    for role, path in model_paths(config).items():
        if role in roles:
            users.setdefault(model_folder(path), set()).add(role)
    for folder, there in users.items():  # once for all the roles that share it
        sources[folder] = SafetensorsSource(folder, load_architecture(folder, config.model.trust_remote_code))
        sources[folder].check(with_output_layer=there != {"critic"})
    return sources


class _RoleBuilder:
    def __init__(
        self, config: Config, runtime: Runtime, sources: Mapping[Path, WeightSource], *, resumed: bool
    ) -> None:
        self._config, self._runtime, self._sources, self._resumed = config, runtime, sources, resumed
        self.origins: list[str] = []

    def policy(
        self, folder: Path, arch: ArchitectureConfig, settings: TrainedRoleSettings, numbers: RoleNumbers
    ) -> tuple[Placement, RoleModel | None]:
        placement = self._placement("actor", settings, numbers)
        source = self._source("actor", settings.start_from, folder, arch)
        return placement, self._model(source, arch, placement, settings.recompute, numbers, None)

    def reference(self, folder: Path, placement: Placement, numbers: RoleNumbers) -> Role:
        arch = load_architecture(folder, self._config.model.trust_remote_code)
        source = self._source("reference", None, folder, arch)
        return Role(placement, self._model(source, arch, placement, "none", numbers, None), self._runtime)

    def critic(self, folder: Path, numbers: RoleNumbers) -> TrainedRole:
        settings = self._config.critic
        assert settings is not None
        arch = load_architecture(folder, self._config.model.trust_remote_code)
        placement = self._placement("critic", settings, numbers)
        source = self._source("critic", settings.start_from, folder, arch)
        head = source.value_head()  # asked on every rank, as `_source` is
        if head is not None and settings.value_head_std and not self._resumed:
            raise ConfigError(
                f"critic.value_head_std {settings.value_head_std:g} is for a new value head, but the critic's weights "
                "have one; set it to 0 to keep that one, or name a folder without a head"
            )
        model = self._model(source, arch, placement, settings.recompute, numbers, settings.value_head_std)
        return self.trained(placement, model, settings, numbers)

    def trained(
        self, placement: Placement, model: RoleModel | None, settings: TrainedRoleSettings, numbers: RoleNumbers
    ) -> TrainedRole:
        with self._runtime.megatron():
            optimizer = make_optimizer(model, settings.optimizer, numbers.total_updates)
        return TrainedRole(placement, model, self._runtime, optimizer)

    def _placement(self, name: str, settings: TrainedRoleSettings, numbers: RoleNumbers) -> Placement:
        grid = Grid(numbers.ranks, numbers.tp, numbers.pp, numbers.ep)
        layout = make_layout(grid, vpp=numbers.vpp, sequence_parallel=settings.layout.sequence_parallel)
        multiple = grid.pp if numbers.vpp > 1 else 1
        return Placement(name, grid, settings.microbatch_budget_tokens, multiple, layout)

    def _model(
        self,
        source: WeightSource,
        arch: ArchitectureConfig,
        placement: Placement,
        recompute: str,
        numbers: RoleNumbers,
        value_head_std: float | None,
    ) -> RoleModel | None:
        if placement.layout is None:
            return None
        options = BuildOptions(
            dtype=DTYPES[self._config.model.dtype],
            device=self._runtime.device,
            padded_vocab=numbers.padded_vocab_size,
            temperature=self._config.rollout.temperature,
            recompute=recompute,
            seed=self._config.run.seed,
            value_head_std=value_head_std,
        )
        with self._runtime.megatron():
            return build_model(arch, placement.layout, options, source)

    def _source(self, role: str, start_from: str | None, folder: Path, arch: ArchitectureConfig) -> WeightSource:
        """On every rank, so that what is wrong with the weights is found where it can be told."""
        if start_from is not None and not self._resumed:
            origin = open_origin(start_from, role, arch, self._runtime)
            self.origins.append(origin.words)
            return origin.source
        if self._config.model.init == "random":
            return RandomSource(arch, self._config.run.seed)
        return self._sources[folder]
