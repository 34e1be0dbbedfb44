"""`changes.jsonl`: changes of settings between the parts of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megappo.commands.report import report
from megappo.observe.changes import change_notes, read_changes, record_changes


def test_recorded_changes_match_the_steps(tmp_path: Path) -> None:
    """A run that resumes at an earlier step replaces the later changes."""
    record_changes(tmp_path, 3, [])
    assert not (tmp_path / "changes.jsonl").exists()
    record_changes(tmp_path, 3, ["a: 1 -> 2"])
    record_changes(tmp_path, 7, ["a: 2 -> 3", "b: 1 -> 2"])
    assert read_changes(tmp_path) == [(3, ["a: 1 -> 2"]), (7, ["a: 2 -> 3", "b: 1 -> 2"])]
    assert change_notes(tmp_path, before_step=7) == ["after step 3: a: 1 -> 2"]
    record_changes(tmp_path, 5, [])
    assert read_changes(tmp_path) == [(3, ["a: 1 -> 2"])]
    record_changes(tmp_path, 3, ["a: 1 -> 9"])
    assert read_changes(tmp_path) == [(3, ["a: 1 -> 9"])]
    record_changes(tmp_path, 3, [])
    assert read_changes(tmp_path) == []


def test_report_shows_changes(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 1.0}) + "\n")
    record_changes(tmp_path, 3, ["reward.scale: 1.0 -> 2.0"])
    assert "settings changed after step 3: reward.scale: 1.0 -> 2.0" in report(str(tmp_path)).splitlines()
    (tmp_path / "changes.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"changes\.jsonl, line 1 has no step; remove the line"):
        report(str(tmp_path))
