"""Description of a trained role for rules."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.config.sections.roles import ActorSettings, CriticSettings, LayoutSettings
from megappo.families.architecture import ModelShape


@dataclass(frozen=True)
class RoleSpec:
    """Name of a trained role in the YAML file, its settings and its model."""

    name: str
    settings: ActorSettings | CriticSettings
    shape: ModelShape

    @property
    def layout(self) -> LayoutSettings:
        """Parallel layout of the role."""
        return self.settings.layout
