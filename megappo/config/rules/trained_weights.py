"""Rules for the trained weights of a role: adapters and frozen parts of a critic."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.rules.role_spec import RoleSpec
from megappo.config.schema import Config
from megappo.config.sections.roles import CriticSettings
from megappo.errors import nearest_word, show
from megappo.families.adapters import least_side, target_names
from megappo.families.declaration import ArchitectureConfig
from megappo.families.frozen import freeze_problems


def base_rules(config: Config) -> Iterator[str]:
    """Check a reference that is the actor without its adapters."""
    reference = config.reference
    if reference is not None and reference.refresh_every_steps and config.actor.lora is not None:
        yield (
            "reference.refresh_every_steps is set, but actor.lora trains only adapters, which the reference does not "
            "use; remove one of them"
        )
    if reference is None or not reference.share_actor_base:
        return
    if config.actor.lora is None:
        yield (
            "reference.share_actor_base is true, but without actor.lora the actor's weights are trained and cannot be "
            "a reference; add actor.lora, or remove share_actor_base"
        )
    if reference.path is not None:
        yield (
            f"reference.share_actor_base is true, but reference.path '{reference.path}' names other weights; "
            "remove one of them"
        )
    if reference.offload.parts:
        yield (
            "reference.share_actor_base is true, so the reference has no weights to offload; set "
            "actor.offload.weights, and remove reference.offload"
        )


def target_rules(role: RoleSpec) -> Iterator[str]:
    """Check that adapters are for existing matrices and that their rank is below the smallest side of the matrices."""
    lora, arch, key = role.settings.lora, role.shape, f"{role.name}.lora"
    if lora is None or not isinstance(arch, ArchitectureConfig):
        return
    if not arch.declaration.adapted:
        yield f"{key} is set, but adapters of a {arch.family} are not supported; train its weights, and remove {key}"
        return
    possible = target_names(arch)
    unknown = [] if lora.targets == "all" else [name for name in lora.targets if name not in possible]
    if unknown:
        yield (
            f"{key}.targets has {show(unknown[0])}, which is no matrix in a layer of a {arch.family}; the names are "
            f"{', '.join(possible)}, and '{nearest_word(unknown[0], possible)}' is the nearest"
        )
        return
    least = least_side(arch, lora.of(arch).targets)
    if lora.rank > least:
        yield f"{key}.rank {lora.rank} is above {least}, the smallest side of its matrices; set at most {least}"


def freeze_rules(role: RoleSpec) -> Iterator[str]:
    """Check that the parts in `freeze` exist and that every layer keeps trainable weights."""
    settings, arch = role.settings, role.shape
    if isinstance(settings, CriticSettings) and settings.freeze and isinstance(arch, ArchitectureConfig):
        lora = None if settings.lora is None else settings.lora.of(arch)
        yield from (f"{role.name}.freeze: {problem}" for problem in freeze_problems(arch, settings.freeze, lora))
