"""`megappo report` for one run, several runs, and unknown metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.commands.report import report


def run_of(directory: Path, metric: str, values: Mapping[int, float]) -> str:
    """Write a run with a metric that has these values at these steps, and no value at other steps. Return its
    directory."""
    directory.mkdir()
    lines = [{"step": step, **({metric: values[step]} if step in values else {})} for step in range(max(values) + 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(directory)


def test_evaluations_are_labelled_with_their_steps(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "eval/reward_mean", {0: 0.1, 10: 0.5, 20: 0.4, 30: 0.3})
    lines = report(run, metric="eval/reward_mean").splitlines()
    assert lines[0] == "eval/reward_mean at 4 steps from 0 to 30"
    assert lines[11:14] == ["       +----", "        0 30", "eval/reward_mean rose: 0.100 at step 0, 0.300 at step 30"]


def test_metric_of_every_step_has_a_chart(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "reward/mean", {step: step / 10 for step in range(1, 8)})
    text = report(run)
    assert "reward/mean over 7 steps" in text and "      1     7" in text
    assert "rose: 0.100 in the first step, 0.500 in the last 5" in text
    late = run_of(tmp_path / "late", "reward/mean", dict.fromkeys(range(6, 9), 1.0))
    assert "did not rise: 1.000 at step 6, 1.000 in the last 3" in report(late)


def test_maximum_is_not_averaged(tmp_path: Path) -> None:
    """The maximum is used for the last steps and for a column of the chart."""
    run = run_of(tmp_path / "run", "response/length_max", {step: 9.0 if step == 97 else 1.0 for step in range(1, 101)})
    text = report(run, metric="response/length_max")
    assert "rose: 1.000 in the first step, 9.000 in the last 5" in text and "\n    9 |" in text
    rest = run_of(tmp_path / "rest", "reward/min", {step: -2.0 if step == 50 else 0.0 for step in range(1, 101)})
    assert "    -2 |" in report(rest, metric="reward/min")


def test_single_value_has_no_chart(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "eval/reward_mean", {0: 0.25})
    lines = report(run, metric="eval/reward_mean").splitlines()
    assert lines[0] == "eval/reward_mean has one value: 0.250 at step 0" and lines[1].startswith("metrics: ")


def test_runs_are_compared_at_their_last_common_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run_of(tmp_path / "one", "eval/reward_mean", {0: 0.1, 10: 0.5, 20: 0.4})
    two = run_of(tmp_path / "two", "eval/reward_mean", {0: 0.2, 10: 0.25})
    assert main(["report", one, two, "--metric", "eval/reward_mean"]) == 0
    output = capsys.readouterr().out
    assert (
        f"{one}:\neval/reward_mean at 3 steps from 0 to 20\n" in output and f"{two}:\neval/reward_mean at 2" in output
    )
    assert output.endswith(f"eval/reward_mean at step 10, the last of all: 0.500 in {one}, 0.250 in {two}\n")
    apart = run_of(tmp_path / "apart", "eval/reward_mean", {5: 0.2})
    assert report(one, apart, metric="eval/reward_mean").endswith("no step has eval/reward_mean in all of these runs")


@pytest.mark.parametrize(
    ("metric", "remedy"),
    [("rewards/mean", "did you mean reward/mean?"), ("q", "it has reward/mean"), ("step", "it has reward/mean")],
)
def test_unknown_metric_is_reported(
    metric: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", "reward/mean", {1: 0.5})
    assert main(["report", run, "--metric", metric]) == 2
    assert capsys.readouterr().err == (
        f"megappo: error: the run in {run} has no finite value of the metric '{metric}'; {remedy}\n"
    )


def test_folder_without_a_run_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", "reward/mean", {1: 0.5})
    assert main(["report", run, str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"megappo: error: {tmp_path} holds no metrics.jsonl; name the directory of a run\n"
    )


def test_line_without_an_end_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such a line could exhaust the memory."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{")
    os.truncate(run / "metrics.jsonl", 2**40)
    assert main(["report", str(run)]) == 2
    assert "has a line of more than 67108864 characters; restore the file of the run" in capsys.readouterr().err


def test_metrics_with_invalid_text_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "reward/mean": 1}\n{"step": 2, "\xff": 1}\n')
    assert main(["report", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert "metrics.jsonl is not UTF-8 (" in errors and errors.count("\n") == 1
