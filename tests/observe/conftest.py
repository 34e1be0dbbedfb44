"""A module in place of wandb, and numbers of TensorBoard."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest


class FakeWandb(types.ModuleType):
    """Module that records its calls. `broken` contains the methods that raise an error."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []
        self.broken: tuple[str, ...] = ()

    @property
    def begun(self) -> list[dict[str, Any]]:
        """Options of each started run."""
        return [data for name, data in self.calls if name == "init"]

    @property
    def logged(self) -> list[tuple[int, dict[str, Any]]]:
        return [data for name, data in self.calls if name == "log"]

    def init(self, **options: Any) -> FakeWandb:
        self._called("init", options)
        return self

    def log(self, data: dict[str, Any], step: int) -> None:
        self._called("log", (step, data))

    def finish(self) -> None:
        self._called("finish", None)

    def _called(self, name: str, data: object) -> None:
        if name in self.broken:
            raise KeyError("api_key not configured\n(no-tty)")  # a type that megappo does not define
        self.calls.append((name, data))

    @staticmethod
    def Table(columns: list[str], data: list[list[str | None]]) -> tuple[list[str], list[list[str | None]]]:
        """Return the arguments."""
        return columns, data


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake
