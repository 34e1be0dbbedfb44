"""`megappo report`: one run, several, and names that are none."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.commands.report import report


def run_of(directory: Path, metric: str, values: Mapping[int, float]) -> str:
    """The directory of a run whose metric has these values at these steps, and nothing at those between."""
    directory.mkdir()
    lines = [{"step": step, **({metric: values[step]} if step in values else {})} for step in range(max(values) + 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(directory)


def test_evaluations_are_labelled_with_their_steps(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "eval/reward_mean", {0: 0.1, 10: 0.5, 20: 0.4, 30: 0.3})
    lines = report(run, metric="eval/reward_mean").splitlines()
    assert lines[0] == "eval/reward_mean at 4 steps from 0 to 30"
    assert lines[11:14] == ["       +----", "        0 30", "eval/reward_mean rose: 0.100 at step 0, 0.300 at step 30"]


def test_a_metric_of_every_step_is_told_over_the_steps(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "reward/mean", {step: step / 10 for step in range(1, 8)})
    told = report(run)
    assert "reward/mean over 7 steps" in told and "      1     7" in told
    assert "rose: 0.100 in the first step, 0.500 in the last 5" in told
    late = run_of(tmp_path / "late", "reward/mean", dict.fromkeys(range(6, 9), 1.0))
    assert "did not rise: 1.000 at step 6, 1.000 in the last 3" in report(late)


def test_a_maximum_stays_a_maximum(tmp_path: Path) -> None:
    """The maximum is used for the last steps and for a column of the chart."""
    run = run_of(tmp_path / "run", "response/length_max", {step: 9.0 if step == 97 else 1.0 for step in range(1, 101)})
    told = report(run, metric="response/length_max")
    assert "rose: 1.000 in the first step, 9.000 in the last 5" in told and "\n    9 |" in told
    rest = run_of(tmp_path / "rest", "reward/min", {step: -2.0 if step == 50 else 0.0 for step in range(1, 101)})
    assert "    -2 |" in report(rest, metric="reward/min")


def test_one_value_is_no_curve(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "eval/reward_mean", {0: 0.25})
    told = report(run, metric="eval/reward_mean").splitlines()
    assert told[0] == "eval/reward_mean has one value: 0.250 at step 0" and told[1].startswith("metrics: ")


def test_several_runs_are_compared_at_the_last_step_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run_of(tmp_path / "one", "eval/reward_mean", {0: 0.1, 10: 0.5, 20: 0.4})
    two = run_of(tmp_path / "two", "eval/reward_mean", {0: 0.2, 10: 0.25})
    assert main(["report", one, two, "--metric", "eval/reward_mean"]) == 0
    told = capsys.readouterr().out
    assert f"{one}:\neval/reward_mean at 3 steps from 0 to 20\n" in told and f"{two}:\neval/reward_mean at 2" in told
    assert told.endswith(f"eval/reward_mean at step 10, the last of all: 0.500 in {one}, 0.250 in {two}\n")
    apart = run_of(tmp_path / "apart", "eval/reward_mean", {5: 0.2})
    assert report(one, apart, metric="eval/reward_mean").endswith("no step has eval/reward_mean in all of these runs")


@pytest.mark.parametrize(
    ("metric", "remedy"),
    [("rewards/mean", "did you mean reward/mean?"), ("q", "it has reward/mean"), ("step", "it has reward/mean")],
)
def test_a_metric_that_no_step_has_is_a_sentence(
    metric: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", "reward/mean", {1: 0.5})
    assert main(["report", run, "--metric", metric]) == 2
    assert capsys.readouterr().err == (
        f"megappo: error: the run in {run} has no finite value of the metric '{metric}'; {remedy}\n"
    )


def test_a_folder_of_no_run_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", "reward/mean", {1: 0.5})
    assert main(["report", run, str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"megappo: error: {tmp_path} holds no metrics.jsonl; name the directory of a run\n"
    )


def test_a_line_without_end_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would take the memory otherwise."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{")
    os.truncate(run / "metrics.jsonl", 2**40)
    assert main(["report", str(run)]) == 2
    assert "has a line of more than 67108864 characters; restore the file of the run" in capsys.readouterr().err


def test_what_is_no_text_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "reward/mean": 1}\n{"step": 2, "\xff": 1}\n')
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "metrics.jsonl is not UTF-8 (" in said and said.count("\n") == 1
