"""The published comparison with measured runs matches the current planner."""

from __future__ import annotations

import pytest

from benchmarks import published_runs
from tests.support.places import ROOT

RESULT = ROOT / "benchmarks" / "results" / "2026-11-21-plan-published.md"


def test_table_is_current() -> None:
    shown = [line for line in RESULT.read_text().splitlines() if line.startswith("|")]
    assert shown == list(published_runs.table())


def test_documents_match_the_table() -> None:
    """The documents contain the least and the greatest ratio of planned to published seconds."""
    ratios = [float(line.split("|")[-2]) for line in list(published_runs.table())[2:]]
    for document in (ROOT / "megappo" / "plan" / "README.md", ROOT / "benchmarks" / "README.md"):
        assert f"{min(ratios)} to {max(ratios)} times" in document.read_text(), document


@pytest.mark.parametrize("run", published_runs.RUNS, ids=lambda r: r.name)
def test_predictions_are_within_a_factor_of_two(run: published_runs.Published) -> None:
    plan = published_runs.plan_of(run)
    assert 0.5 < plan.step_seconds / run.step_seconds < 2
    assert (plan.gpus, plan.gpus + plan.server_gpus) == (run.trainers, run.gpus)
    assert 90 < run.prompt_tokens < 150  # all runs use the same data set
