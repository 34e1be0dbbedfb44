"""Run the doctor and other commands on machines with problems."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from megappo.cli import main
from tests.support import worlds


@pytest.fixture
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the repository, and remove all variables of launchers."""
    monkeypatch.chdir(worlds.ROOT)
    for name in set(os.environ) - set(worlds.environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def findings(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, dict[str, str]]]:
    """Return a function that runs `megappo doctor --json`, checks its exit code, and returns the last finding of every
    check."""

    def findings(*arguments: object) -> dict[str, dict[str, str]]:
        code = main(["doctor", *map(str, arguments), "--json"])
        reported = json.loads(capsys.readouterr().out)["findings"]
        assert code == int(any(f["state"] == "broken" for f in reported))
        return {f["check"]: f | {"code": str(code)} for f in reported}

    return findings


@pytest.fixture
def expect(findings: Callable[..., dict[str, dict[str, str]]]) -> Callable[..., None]:
    """Return a function that runs the doctor and compares a finding with parts of its sentence. With the state `fine`,
    no check is broken."""

    def expect(check: str, state: str, message: str, remedy: str, *arguments: object) -> None:
        finding = findings(*arguments)[check]
        assert (finding["state"], message in finding["words"], remedy in finding["remedy"]) == (state, True, True), (
            finding
        )
        assert state != "fine" or finding["code"] == "0"

    return expect


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command, checks exit code and message, and returns the whole output."""

    def refused(message: str, *arguments: object, code: int = 2) -> str:
        returned = main([str(word) for word in arguments])
        captured = capsys.readouterr()
        output = captured.out + captured.err
        assert (returned, message in output) == (code, True), output
        return output

    return refused
