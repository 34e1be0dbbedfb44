"""The doctor on several ranks: the groups and clocks of the ranks."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.harness import launch
from tests.support.places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.waits]


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
