"""Checks of the doctor that run on an ordinary machine, and the doctor on several ranks."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from megappo.config import ConfigError, Derived, RoleNumbers, load_config
from megappo.config.grid import Grid
from megappo.doctor.findings import Finding, any_broken, as_text, broken, fine, merge, slow, until_refused
from megappo.doctor.network import GroupKind, Measured, group_kinds, judge
from megappo.doctor.software import REQUIRED, SGLANG, logger_findings, satisfies
from megappo.errors import RunError
from tests.support.harness import launch
from tests.support.places import BASE, ROOT


def test_requirements_equal_those_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    dynamic = declared["tool"]["setuptools"]["dynamic"]
    assert dynamic["dependencies"] == {"file": "megappo/requirements.txt"}
    assert REQUIRED[0].startswith("torch>=")
    assert declared["project"]["optional-dependencies"]["sglang"] == [SGLANG]


@pytest.mark.parametrize(
    ("version", "bounds", "is_satisfied"),
    [
        ("2.13.0+cpu", ">=2.11", True), ("2.9.1", ">=2.11", False), ("0.20", ">=0.16,<0.20", False),
        ("0.19.2rc1", ">=0.16,<0.20", True), ("0.5.23", "==0.5.23", True), ("0.5.23.1", "==0.5.23", False),
        ("5", ">=5,<6", True), ("anything", "", True),
    ],
)  # fmt: skip
def test_versions(version: str, bounds: str, is_satisfied: bool) -> None:
    assert satisfies(version, bounds) is is_satisfied


@pytest.fixture
def fresh_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python searches `tmp_path` for wandb, and the test imports wandb for the first time."""
    monkeypatch.syspath_prepend(tmp_path)
    before = sys.modules.pop("wandb", None)
    yield
    sys.modules.pop("wandb", None)
    if before is not None:
        sys.modules["wandb"] = before


@pytest.mark.usefixtures("fresh_wandb")
@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
@pytest.mark.parametrize("has_folder", [False, True])
def test_wandb_must_be_installed(tmp_path: Path, has_folder: bool) -> None:
    """An earlier run leaves a folder `wandb`. Python imports the folder as an empty package."""
    if has_folder:
        (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    (finding,) = logger_findings(load_config(BASE, ["logging.wandb_project=sums"]))
    instead = f", and Python imports the folder {tmp_path / 'wandb'} instead" if has_folder else ""
    sentence = f"logging.wandb_project is 'sums', but wandb is not installed{instead}; pip install '.[wandb]'"
    assert finding.state == "broken" and finding.sentence().startswith(sentence)


@pytest.mark.usefixtures("fresh_wandb")
def test_wandb_package_with_a_failing_import(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text("import no_such_package\n")
    (finding,) = logger_findings(load_config(BASE, ["logging.wandb_project=sums"]))
    assert "but wandb cannot be imported: " in finding.sentence() and "no_such_package" in finding.sentence()


def test_findings_name_their_machines() -> None:
    sick = broken("disk", "full", "free some")
    merged = merge([("a", [fine("gpu", "8")]), ("b", [fine("gpu", "8"), sick]), ("a", []), ("b", [fine("gpu", "8")])])
    assert [f.machines for f in merged] == [("a", "b"), ("b",)]
    assert any_broken(merged)
    assert as_text(merged, 2).splitlines() == [
        "fine    gpu              8 (all 2 machines)",
        "broken  disk             full (b); free some",
        "1 fine, 0 slow, 1 broken",
    ]
    assert not any_broken([slow("a", "b", "c")])


@pytest.mark.parametrize(
    ("error", "findings"),
    [
        (
            ConfigError(["a is 1; 2; give 3", "b"]),
            [broken("data", "a is 1; 2", "give 3"), Finding("data", "broken", "b")],
        ),
        (RunError("no disk; add one"), [broken("data", "no disk", "add one")]),
    ],
)
def test_errors_of_a_check_become_findings(error: Exception, findings: list[Finding]) -> None:
    def check() -> Iterator[Finding]:
        yield fine("tokenizer", "512 tokens")
        raise error

    assert list(until_refused("data", check())) == [fine("tokenizer", "512 tokens"), *findings]
    assert [finding.sentence() for finding in findings] == str(error).splitlines()


def test_bug_in_a_check_is_no_finding() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        list(until_refused("data", map(json.loads, ["x"])))


def role(tp: int, pp: int, ranks: range) -> RoleNumbers:
    return RoleNumbers(Grid(ranks, tp, pp), 1, 16, 1, 1, 1)


def test_groups_of_roles_on_separate_ranks() -> None:
    derived = Derived(8, role(2, 2, range(4)), role(1, 2, range(4, 8)), ())
    kinds = {f.name: f for f in group_kinds(derived, 8)}
    assert list(kinds) == ["world", "actor TP 2", "actor PP 2", "critic PP 2", "critic DP 2"]
    assert kinds["actor TP 2"].groups == ((0, 1), (2, 3))
    assert kinds["actor PP 2"].groups == ((0, 2), (1, 3))
    assert kinds["actor PP 2"].point_to_point
    assert kinds["critic DP 2"].groups == ((4, 6), (5, 7))
    same = dataclasses.replace(derived, critic=derived.actor)
    assert [f.name for f in group_kinds(same, 8)] == ["world", "actor TP 2, critic TP 2", "actor PP 2, critic PP 2"]
    assert group_kinds(None, 1) == []


def test_groups_of_context_parallel_ranks() -> None:
    numbers = RoleNumbers(Grid(range(8), 2, 1, cp=2), 1, 16, 1, 1, 1)
    kinds = {f.name: f for f in group_kinds(Derived(8, numbers, None, ()), 8)}
    assert list(kinds) == ["world", "actor TP 2", "actor CP 2", "actor DP x CP 4"]
    assert kinds["actor CP 2"].groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert kinds["actor DP x CP 4"].groups == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_slow_group_is_named() -> None:
    kind = GroupKind("actor TP 8", tuple(tuple(range(8 * n, 8 * n + 8)) for n in range(3)))
    measured = {ranks: Measured(3e-5, 300e9) for ranks in kind.groups}
    assert judge(kind, measured, "cuda").text == "actor TP 8 (3 groups): 300.00 GB/s, 30 us"
    measured[kind.groups[1]] = Measured(9e-5, 20e9)
    finding = judge(kind, measured, "cuda")
    assert finding.state == "slow"
    assert finding.text.endswith("20.00 GB/s, 90 us in the slowest (ranks 8-15), 300.00 GB/s in the median")
    everywhere = dict.fromkeys(kind.groups, Measured(1e-3, 1e9))
    assert "below 10 GB/s" in judge(kind, everywhere, "cuda").text


@pytest.mark.slow
@pytest.mark.waits
def test_four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group of the settings is measured, and a wrong clock is reported."""
    monkeypatch.chdir(ROOT)
    layouts = ("critic.layout={pipeline_parallel: 2, tensor_parallel: 2}", "runtime.threads_per_rank=1")
    output = launch("doctor_worker.py", 4, "configs/quickstart.yaml", *layouts, "--json")
    report = json.loads(re.search(r"^\{.*^\}", output, re.DOTALL | re.MULTILINE)[0])  # type: ignore[index]
    assert report["broken"] is False
    assert len(report["machines"]) == 1
    findings = {f["check"]: f for f in report["findings"]}
    assert findings["rendezvous"]["words"].startswith("4 ranks met on ")
    assert findings["clock"]["state"] == "slow"
    assert re.match(r"clocks differ by (29\.9|30\.\d) seconds", findings["clock"]["words"])
    groups = [f["words"] for f in report["findings"] if f["check"] == "group"]
    measured = r"\(\d groups?\): \d+\.\d\d GB/s, \d+ us"
    names = ["world", "actor TP 2, critic TP 2", "actor DP 2", "critic PP 2"]
    assert [re.sub(measured, "", group).split(" (")[0].strip() for group in groups] == names, groups
    assert all(re.search(measured, group) for group in groups)
