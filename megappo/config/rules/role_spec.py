"""A trained role as rules see it."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.config.roles import ActorSettings, CriticSettings, LayoutSettings
from megappo.families.architecture import ModelShape


@dataclass(frozen=True)
class RoleSpec:
    """A trained role's name in the YAML file, its settings and its model."""

    name: str
    settings: ActorSettings | CriticSettings
    shape: ModelShape

    @property
    def layout(self) -> LayoutSettings:
        """The role's parallel layout."""
        return self.settings.layout
