"""The example run of megappo/guides/gae.md and its broken variants. The tests distinguish the variants as described
in the guide."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from megappo.cli import main
from megappo.config import load_config
from megappo.observe.metrics import read_metrics
from megappo.observe.saved_samples import StepSums, read_sums, saved_steps
from megappo.ppo.records.experience_files import read_samples
from megappo.ppo.reports.advice import Advisor, advice_text
from tests.support.attempts import attempts
from tests.support.browser import browser, needs_browser
from tests.support.places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.waits]

PAGE = ROOT / "megappo" / "guides" / "gae.md"


def broken_on_the_page() -> dict[str, list[str]]:
    """Return the arguments of the runs in the guide by run name."""
    commands = re.findall(r"^megappo train (configs/examples.*)$", PAGE.read_text(), re.MULTILINE)
    command_lines = [shlex.split(command, comments=True) for command in commands]
    return {
        next(w for w in line if w.startswith("run.name=")).removeprefix("run.name="): line for line in command_lines
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Run all examples in sequence and return their directories."""
    folder = tmp_path_factory.mktemp("runs")
    lines = broken_on_the_page()
    planned = [
        {"arguments": ["train", *command_lines, f"run.directory={folder / name}", "runtime.device=cpu"], "processes": 1,
         "expect": "0"}
        for name, command_lines in lines.items()
    ]  # fmt: skip
    attempts(folder, *planned, timeout=280)
    return {name: folder / name for name in lines}


def sums_of(run: Path) -> StepSums:
    """Return the sums of the last step."""
    (saved,) = saved_steps(run / "experience").values()
    return read_sums(saved.files)


def advice_of(run: Path) -> set[str]:
    """Return the names of the advice about the critic in this run."""
    advisor = Advisor(load_config(run / "config.yaml").algorithm)
    advice = {s for line in read_metrics(run / "metrics.jsonl") for s in advisor.observe(line["step"], line)}
    return {name for name in ("explained_variance", "critic_overshoots") if advice_text(name) in advice}


@needs_browser
def test_report_page_of_two_runs(runs: Mapping[str, Path], tmp_path: Path) -> None:
    """Two runs share a page. Every chart has marks, Tab reaches every control, and the page requests no other
    resources."""
    file = tmp_path / "page.html"
    assert main(["report", str(runs["right"]), str(runs["fast"]), "--html", str(file)]) == 0
    with browser(tmp_path / "profile") as page:
        page.open(file, dark=True)
        marks = page.charts()
        assert all(marks.values()), marks
        for run in ("right", "fast"):
            assert {
                f"Time by stage of {run}",
                f"Peaks of stages: memory of {run}",
                f"Advantages of {run} over steps",
            } <= marks.keys()
        assert {"Curve of reward/mean", "Curve of critic/explained_variance"} <= marks.keys()
        page.value("document.querySelector('#picker').open = true")
        assert page.out_of_reach() == []
        page.value(CHANGES)
        marks = page.charts()
        assert "Curve of time/step" in marks and all(marks.values()), marks
        assert "log-probability" in page.value("document.querySelector('.told').textContent")
        assert page.value("document.querySelector('.tokens .here').textContent.length") > 0
        assert page.complaints == [] and page.requests == [file.as_uri()]


CHANGES = """
for (const [id, value] of [["smoothing", 0.9], ["over", "hours"], ["search", "time/"]]) {
  document.getElementById(id).value = value;
  document.getElementById(id).dispatchEvent(new Event("input"));
}
document.getElementById("found").click();
document.querySelector(".tokens").dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
"""
"""Select other curves, smoothing, time as the axis, and the next token."""


def test_explained_variance_precedes_the_updates(runs: Mapping[str, Path]) -> None:
    """numpy computes the expected value from the saved values of the forward pass and the saved rewards, with gamma 1
    and for any lambda."""
    for name, run in runs.items():
        (saved,) = saved_steps(run / "experience").values()
        whole = read_samples(saved.file(0)).experience
        rewards_BR, values_BR = whole.rewards_BR, whole.scored.values_BR
        assert rewards_BR is not None and values_BR is not None
        mask = whole.scored.rollouts.response_mask_BR.numpy()
        if name == "mask":
            mask &= ~whole.scored.rollouts.truncated_B.numpy()[:, None]
        rewards = np.where(mask, rewards_BR.double().numpy(), 0)
        returns = np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1][mask]
        values = values_BR.double().numpy()[mask]
        last = read_metrics(run / "metrics.jsonl")[-1]
        truth = 1 - (returns - values).var() / returns.var()
        assert last["critic/explained_variance"] == pytest.approx(truth, abs=1e-5), name
        assert last["critic/value_mean"] == pytest.approx(values.mean(), abs=1e-5), name


def test_metrics_distinguish_five_broken_runs(runs: Mapping[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert list(runs) == ["right", "mask", "reward", "lambda", "slow", "fast"]
    sums = {name: sums_of(run) for name, run in runs.items()}
    for name, step_sums in sums.items():
        assert step_sums.tokens == step_sums.own and step_sums.reward_elsewhere == 0.0
        assert (step_sums.counted < 0.2 * step_sums.own) == (name == "mask")
        assert (step_sums.reward_at_end < 0.9) == (name == "reward")
        assert (step_sums.return_gap > 0.05) == (name == "lambda")
        assert step_sums.values is not None
        assert (step_sums.values.std < 0.01 * step_sums.returns.std) == (name == "slow")
    assert sums["right"].explained_variance > 0.1 and sums["right"].correlation > 0.3
    advice = {name: advice_of(run) for name, run in runs.items()}
    assert advice.pop("slow") == {"explained_variance"}
    assert advice.pop("fast") == {"critic_overshoots"}
    assert advice["right"] == advice["lambda"] == set()
    capsys.readouterr()
    assert main(["inspect", str(runs["mask"])]) == 0
    output = capsys.readouterr().out
    assert "truncated samples are left out of the losses" in output and ", in the losses " in output
    assert main(["inspect", str(runs["lambda"]), "--sample", "0"]) == 0
    assert "lambda 0, KL in the reward times 0.01 (fixed)" in capsys.readouterr().out
