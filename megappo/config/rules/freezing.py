"""Rules of what is frozen of a critic."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.roles import CriticSettings
from megappo.config.rules.role_spec import RoleSpec
from megappo.families.architecture import ArchitectureConfig
from megappo.families.frozen import freeze_problems


def freeze_rules(role: RoleSpec) -> Iterator[str]:
    """Rules on `freeze`: what it names exists, and every layer keeps something to train."""
    settings, arch = role.settings, role.shape
    if isinstance(settings, CriticSettings) and settings.freeze and isinstance(arch, ArchitectureConfig):
        lora = None if settings.lora is None else settings.lora.of(arch)
        yield from (f"{role.name}.freeze: {words}" for words in freeze_problems(arch, settings.freeze, lora))
