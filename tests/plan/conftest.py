"""Run the tests of this folder in the repository."""

import pytest

from tests.support.places import ROOT


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
