"""Construction of the models of all roles on their layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.config import Config, ConfigError, Derived, RoleNumbers
from megappo.config.pipeline import chunk_layers, even_layers, stage_layers
from megappo.config.role_models import load_architecture, model_paths, role_folder
from megappo.config.sections.roles import ActorSettings, CriticSettings, OffloadSettings, TrainedRoleSettings
from megappo.families.declaration import ArchitectureConfig
from megappo.families.flops import sample_cost
from megappo.families.weights import WeightSource
from megappo.megatron.build import DTYPES, BuildOptions, build_model, first_value_head
from megappo.megatron.layout import Cut, Layout, Outside, make_layouts
from megappo.megatron.optimizer.optimization import RoleOptimizer
from megappo.megatron.roles import AbsentRole, LocalRole, Placement, Role, TrainedRole, base_of
from megappo.models.model_files import model_folder
from megappo.models.weight_files import NotFiniteError
from megappo.ppo.assembly.origins import open_start
from megappo.reshard.mtp import MTPLayers
from megappo.reshard.peft import FreshAdapters
from megappo.reshard.sources import RandomSource, SafetensorsSource
from megappo.runtime.accelerations import find_accelerations
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import agreed

ROLES = ("actor", "critic", "reference")
_Sources = tuple[WeightSource, WeightSource | None]
"""Sources of the weights and, for a model with LoRA, of the adapters."""


def weight_sources(config: Config, roles: Sequence[str]) -> Mapping[Path, SafetensorsSource]:
    """Return the weight source of each folder that these roles use. Empty with random weights.

    Every rank checks the headers of all files before any model is built, so that all ranks find the same error.
    """
    sources: dict[Path, SafetensorsSource] = {}
    if config.model.init == "random":
        return sources
    users: dict[Path, set[str]] = {}
    for role, path in model_paths(config).items():
        if role in roles:
            users.setdefault(model_folder(path), set()).add(role)
    for folder, roles_of_folder in users.items():  # once for all roles that share a folder
        sources[folder] = SafetensorsSource(folder, load_architecture(folder, config.model))
        sources[folder].check(with_output_layer=roles_of_folder != {"critic"})
    return sources


def _cuts(config: Config, derived: Derived) -> dict[str, Cut]:
    """Return the cuts of actor and critic. The reference uses the cut of the actor."""
    roles = {"actor": (config.actor, derived.actor), "critic": (config.critic, derived.critic)}
    return {
        name: Cut(numbers.grid, numbers.vpp, settings.layout.shards_sequences)
        for name, (settings, numbers) in roles.items()
        if settings is not None and numbers is not None
    }


class ModelBuilder:
    """Builds the models. Every rank must call every method, in the same order."""

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
        """Check the weights of the roles' folders and create the process groups. A collective of the world.

        `resumed`: whether a checkpoint will replace all built weights, so that `start_from` is not read.
        `stop_token_ids`: tokens that the engine does not sample before `rollout.min_response_tokens`.
        Raises ValueError on every rank if any rank cannot use a folder.
        """
        self._config, self._derived, self._runtime, self._resumed = config, derived, runtime, resumed
        self._stop_token_ids = stop_token_ids if config.rollout.min_response_tokens else ()
        self._sources = agreed(lambda: weight_sources(config, roles))
        cuts = {role: cut for role, cut in _cuts(config, derived).items() if role in roles}
        self._layouts = make_layouts(cuts, runtime.device.type, runtime.deadlines.collective_seconds)
        self.origins: list[str] = []
        """Messages that name the weights of each model that starts with weights from another folder."""

    def mtp_layers(self) -> MTPLayers:
        """Return the multi-token prediction layers of the policy model, if the model has such layers."""
        folder = role_folder(self._config, "actor")
        source = self._sources.get(folder)
        mtp_source = None if source is None else source.of_mtp_layers()
        return MTPLayers(load_architecture(folder, self._config.model), mtp_source)

    def actor(self, *, trained: bool = True) -> Role:
        """Build the policy, with an optimizer if `trained` is true."""
        settings = self._config.actor
        weights = self._weights("actor", settings)
        return self._with_settings("actor", settings, self._derived.actor, weights, trained=trained)

    def reference(self, actor: Role) -> Role | None:
        """Build the frozen policy on the layout of the actor. Returns None without a reference."""
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
        """Build the value model. Returns None without a critic."""
        settings, numbers = self._config.critic, self._derived.critic
        if settings is None or numbers is None:
            return None
        arch, source, adapters = self._weights("critic", settings)
        # Every rank reads the head, so that all ranks raise the same error.
        head = first_value_head((adapters, source))
        if head is not None and settings.value_head_std and not self._resumed:
            raise ConfigError(
                f"critic.value_head_std {settings.value_head_std:g} is for a new value head, but the critic's "
                "weights have one; set it to 0 to keep the existing head, or name a folder without a head"
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
        """Build the role of this name, with an optimizer if `trained` is true."""
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
        """Offload the tensors that the settings select before the next role is built."""
        role.rest()
        return role

    def _weights(self, role: str, settings: TrainedRoleSettings | None) -> tuple[ArchitectureConfig, *_Sources]:
        """Return the architecture, weights and adapters of a role.

        Every rank reads them, so that every rank raises the same error.
        """
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
        """Return the build options of a role. `trained` is the architecture and the settings of a trained role."""
        role_options: dict[str, Any] = {"stop_token_ids": self._stop_token_ids}
        if trained is not None:
            arch, settings = trained
            role_options |= {
                "recompute": settings.recompute,
                "recompute_modules": settings.recompute_modules,
                "deallocate_pipeline_outputs": settings.layout.deallocate_pipeline_outputs,
                "router_aux_loss_coef": settings.router_aux_loss_coef,
                "lora": None if settings.lora is None else settings.lora.of(arch),
            }
            if isinstance(settings, CriticSettings):
                role_options |= {
                    "freeze": settings.freeze,
                    "value_head_std": settings.value_head_std,
                    "stop_token_ids": (),
                }
            else:  # the reference is a separate policy: its routers choose experts independently of the actor
                role_options["replays_routing"] = self._config.algorithm.replays_routing(arch.experts)
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
            **role_options,
        )
