"""Builds the models of a run's roles on their layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.config import Config, ConfigError, Derived, RoleNumbers
from megappo.config.model_files import load_architecture, model_folder, model_paths, role_folder
from megappo.config.pipeline import chunk_layers, even_layers, stage_layers
from megappo.config.roles import ActorSettings, CriticSettings, OffloadSettings, TrainedRoleSettings
from megappo.families.architecture import ArchitectureConfig
from megappo.families.flops import sample_cost
from megappo.families.weights import WeightSource
from megappo.megatron.build import DTYPES, BuildOptions, build_model, first_value_head
from megappo.megatron.layout import Cut, Layout, Outside, make_layouts
from megappo.megatron.optimization import RoleOptimizer
from megappo.megatron.roles import AbsentRole, LocalRole, Placement, Role, TrainedRole, base_of
from megappo.ppo.origins import open_start
from megappo.reshard.files import NotFiniteError
from megappo.reshard.mtp import MTPLayers
from megappo.reshard.peft import FreshAdapters
from megappo.reshard.sources import RandomSource, SafetensorsSource
from megappo.runtime.accelerations import find_accelerations
from megappo.runtime.objects import agreed
from megappo.runtime.process import Runtime

ROLES = ("actor", "critic", "reference")
_Sources = tuple[WeightSource, WeightSource | None]
"""Source of a model's weights, and of its adapters where it has some."""


def weight_sources(config: Config, roles: Sequence[str]) -> Mapping[Path, SafetensorsSource]:
    """Weights of each folder that these roles use; empty with random weights.

    Every rank checks the headers of all files before any model is built, so that all find the same mistake.
    """
    sources: dict[Path, SafetensorsSource] = {}
    if config.model.init == "random":
        return sources
    users: dict[Path, set[str]] = {}
    for role, path in model_paths(config).items():
        if role in roles:
            users.setdefault(model_folder(path), set()).add(role)
    for folder, there in users.items():  # once for all roles that share a folder
        sources[folder] = SafetensorsSource(folder, load_architecture(folder, config.model))
        sources[folder].check(with_output_layer=there != {"critic"})
    return sources


def _cuts(config: Config, derived: Derived) -> dict[str, Cut]:
    """Cuts of actor and critic; the reference has the actor's."""
    roles = {"actor": (config.actor, derived.actor), "critic": (config.critic, derived.critic)}
    return {
        name: Cut(numbers.grid, numbers.vpp, settings.layout.shards_sequences)
        for name, (settings, numbers) in roles.items()
        if settings is not None and numbers is not None
    }


class ModelBuilder:
    """Builds the models; every rank calls every method, in the same order."""

    def __init__(
        self,
        config: Config,
        derived: Derived,
        runtime: Runtime,
        *,
        roles: Sequence[str] = ROLES,
        resumed: bool = False,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        """Check the weights of these roles' folders and make their process groups; a collective of the world.

        `resumed`: whether a checkpoint will replace all built weights, so that `start_from` is not needed any more.
        `stop_token_ids`: tokens that the engine does not sample before `rollout.min_response_tokens`.
        Raises ValueError on every rank where one of them cannot use a folder.
        """
        self._config, self._derived, self._runtime, self._resumed = config, derived, runtime, resumed
        self._stop_token_ids = stop_token_ids if config.rollout.min_response_tokens else ()
        self._sources = agreed(lambda: weight_sources(config, roles))
        cuts = {role: cut for role, cut in _cuts(config, derived).items() if role in roles}
        self._layouts = make_layouts(cuts, runtime.device.type, runtime.deadlines.collective_seconds)
        self.origins: list[str] = []
        """A sentence for each model that begins with weights of another folder than its own."""

    def mtp_layers(self) -> MTPLayers:
        """Layers of the policy's model that predict further tokens (multi-token prediction), where it has some."""
        folder = role_folder(self._config, "actor")
        source = self._sources.get(folder)
        kept = None if source is None else source.of_mtp_layers()
        return MTPLayers(load_architecture(folder, self._config.model), kept)

    def actor(self, *, trained: bool = True) -> Role:
        """The policy, with an optimizer if it is `trained`."""
        settings = self._config.actor
        weights = self._weights("actor", settings)
        return self._with_settings("actor", settings, self._derived.actor, weights, trained=trained)

    def reference(self, actor: Role) -> Role | None:
        """The frozen policy on the actor's layout; None where there is no reference."""
        settings = self._config.reference
        if settings is None:
            return None
        if settings.share_actor_base:
            return base_of(actor)
        arch, source, _ = self._weights("reference", None)
        layers = chunk_layers(self._config, "actor", self._config.actor, arch)
        options = self._options(self._derived.actor, layers, settings.offload)
        return self._at_rest(self._role(actor.placement, actor.layout, arch, (source, None), options))

    def critic(self) -> Role | None:
        """The value model; None where there is no critic."""
        settings, numbers = self._config.critic, self._derived.critic
        if settings is None or numbers is None:
            return None
        arch, source, adapters = self._weights("critic", settings)
        head = first_value_head((adapters, source))  # on every rank, as `_weights`, so that all raise alike
        if head is not None and settings.value_head_std and not self._resumed:
            raise ConfigError(
                f"critic.value_head_std {settings.value_head_std:g} is for a new value head, but the critic's weights "
                "have one; set it to 0 to keep that one, or name a folder without a head"
            )
        return self._with_settings("critic", settings, numbers, (arch, source, adapters))

    def _with_settings(
        self,
        name: str,
        settings: ActorSettings | CriticSettings,
        numbers: RoleNumbers,
        weights: tuple[ArchitectureConfig, *_Sources],
        *,
        trained: bool = True,
    ) -> Role:
        """The role of this name, with an optimizer if it is `trained`."""
        arch, source, adapters = weights
        layers, grid = chunk_layers(self._config, name, settings, arch), numbers.grid
        placement = Placement(
            name,
            grid,
            settings.microbatch_budget_tokens,
            microbatch_multiple=grid.pp if numbers.vpp > 1 else 1,
            cost=sample_cost(arch, is_critic=name == "critic"),
            stage_layers=stage_layers(layers or even_layers(arch.layers, grid.pp * numbers.vpp), grid.pp),
        )
        options = self._options(numbers, layers, settings.offload, (arch, settings))
        role = self._role(placement, self._layouts[name], arch, (source, adapters), options)
        if trained and isinstance(role, LocalRole):
            optimizer = RoleOptimizer(role.model, settings.optimizer, numbers.total_updates)
            role = TrainedRole(role.placement, role.model, self._runtime, optimizer)
        return self._at_rest(role)

    def _at_rest(self, role: Role) -> Role:
        """Offload what the settings say before the next role is built."""
        role.rest()
        return role

    def _weights(self, role: str, settings: TrainedRoleSettings | None) -> tuple[ArchitectureConfig, *_Sources]:
        """Architecture, weights and adapters of a role; read on every rank, so that an error is raised where it can be
        reported."""
        folder = role_folder(self._config, role)
        arch, seed = load_architecture(folder, self._config.model), self._config.run.seed
        lora = settings.lora.of(arch) if settings is not None and settings.lora is not None else None
        origin: WeightSource | None = None
        opened = None if self._resumed else open_start(self._config, role, arch, self._runtime, lora)
        if opened is not None:
            self.origins.append(opened.summary)
            origin = opened.source
        if lora is None and origin is not None:
            return arch, origin, None
        own = RandomSource(arch, seed) if self._config.model.init == "random" else self._sources[folder]
        return arch, own, origin if lora is None else origin or FreshAdapters(arch, lora, seed)

    def _role(
        self,
        placement: Placement,
        layout: Layout | Outside,
        arch: ArchitectureConfig,
        sources: _Sources,
        options: BuildOptions,
    ) -> Role:
        def built() -> Role:
            if isinstance(layout, Outside):
                return AbsentRole(placement, arch, options, self._runtime)
            return LocalRole(placement, build_model(arch, layout, options, *sources), self._runtime)

        return agreed(built, (NotFiniteError,))

    def _options(
        self,
        numbers: RoleNumbers,
        layers: tuple[int, ...] | None,
        offload: OffloadSettings,
        trained: tuple[ArchitectureConfig, ActorSettings | CriticSettings] | None = None,
    ) -> BuildOptions:
        """Build options of a role; `trained` is the architecture and settings of a trained one."""
        kept: dict[str, Any] = {"stop_token_ids": self._stop_token_ids}
        if trained is not None:
            arch, settings = trained
            kept |= {
                "recompute": settings.recompute,
                "recompute_modules": settings.recompute_modules,
                "deallocate_pipeline_outputs": settings.layout.deallocate_pipeline_outputs,
                "router_aux_loss_coef": settings.router_aux_loss_coef,
                "lora": None if settings.lora is None else settings.lora.of(arch),
            }
            if isinstance(settings, CriticSettings):
                kept |= {"freeze": settings.freeze, "value_head_std": settings.value_head_std, "stop_token_ids": ()}
            else:  # the reference is a policy of its own, whose routers choose as without an actor
                kept["replays_routing"] = self._config.algorithm.replays_routing(arch.experts)
        return BuildOptions(
            dtype=DTYPES[self._config.model.dtype],
            device=self._runtime.device,
            padded_vocab=numbers.padded_vocab_size,
            temperature=self._config.rollout.temperature,
            chunk_layers=layers,
            seed=self._config.run.seed,
            accelerations=find_accelerations(self._config.model.accelerations),
            offload=offload,
            offload_directory=self._config.runtime.offload_directory,
            **kept,
        )
