"""`megappo report`: texts for one or several runs, and one HTML file with all data, which a browser shows."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megappo.cli import main
from megappo.commands.report import report
from megappo.config import load_config, save_config
from tests.observe.test_page import HOSTILE, embedded
from tests.support.browser import browser, needs_browser
from tests.support.places import BASE, ROOT
from tests.support.saved import save_step, two_samples

LARGEST_BYTES = 5_000_000


def write_lines(path: Path, *records: Mapping[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_run(directory: Path, *overrides: str, steps: int = 12, metrics: int = 0) -> Path:
    """Write a run in which half of the responses are truncated, step 5 has unusual updates, and step 3 is traced."""
    directory.mkdir()
    save_config(load_config(BASE, [f"run.directory={directory}", *overrides]), directory / "config.yaml")
    others = {f"source/{number}/reward_mean": number / 7 for number in range(metrics)}
    times = {"time/step": 2.0, "time/rollout": 1.5, "time/update_actor": 0.25}
    syncs = {"sync/seconds": 0.2, "sync/load_seconds": 0.125, "memory/peak_gigabytes": 3.0}
    lines = (
        {"step": step, "reward/mean": math.sqrt(step), "response/truncated": 0.6, **times, **syncs, **others}
        for step in range(1, steps + 1)
    )
    write_lines(directory / "metrics.jsonl", {"step": 0, "eval/reward_mean": 0.25}, *lines)
    write_lines(directory / "samples.jsonl", {"step": 1, "prompt": HOSTILE, "raw_response": HOSTILE, "score": 1.0})
    record = {"role": "critic", "minibatch": 1, "reasons": [f"norm {HOSTILE}"], "samples": []}
    write_lines(directory / "jumps.jsonl", {"step": 5, **record})
    (directory / "profile").mkdir()
    page = f"# Step 3, traced\n\n| stage | rank |\n|---|---|\n| rollout | {HOSTILE[:9]} |\n\nSeconds.\n"
    (directory / "profile" / "step-000003.md").write_text(page)
    return directory


def page_of(output_of: Callable[..., str], file: Path, *directories: Path) -> Any:
    """Run the command. Return the data of the written page."""
    printed = output_of("report", *map(str, directories), "--html", file)
    assert printed == f"{file}: {file.stat().st_size / 1e3:,.0f} kB\n"
    return embedded(file.read_bytes())


def test_page_of_two_runs(tmp_path: Path, output_of: Callable[..., str]) -> None:
    one = make_run(tmp_path / "one", "run.seed=4")
    two = make_run(tmp_path / "two", "run.steps=12", steps=4)
    (two / "final").mkdir()
    data = page_of(output_of, tmp_path / "page.html", one, two)
    first, second = data["runs"]
    assert (first["name"], first["directory"], first["notes"]) == ("one", str(one), [])
    assert second["status"] == "step 4 of 12, the trained actor is in final/"
    message = "eval 0.250 at first, 0.250 in the last evaluation; reward/mean 1.000 at first, 1.537 in the last 4 steps"
    assert second["result"] == message
    assert data["first"] == ["eval/reward_mean", "reward/mean", "response/truncated"]
    assert dict(second["metrics"])["reward/mean"] == [None, 1, 1.41421, 1.73205, 2]
    assert second["steps"] == [0, 1, 2, 3, 4] and second["hours"][-1] == pytest.approx(8 / 3600, abs=1e-6)
    assert [(step, what) for step, what, _ in first["advice"]] == [(1, "truncated")]
    assert "raise rollout.max_response_tokens" in first["advice"][0][2]
    assert first["jumps"] == [[5, "critic update stands out", f"update 1: norm {HOSTILE}"]]
    settings = {key: values for key, values in data["settings"] if values[0] != values[1]}
    assert settings["run.seed"][0] == "4" and settings["run.steps"][1] == "12"
    assert settings.keys() == {"run.directory", "run.seed", "run.steps"}
    assert first["profile"][0].startswith("# Step 3, traced") and first["samples"][0]["prompt"] == HOSTILE


def test_large_run_has_a_small_page(tmp_path: Path, output_of: Callable[..., str]) -> None:
    run = make_run(tmp_path / "run", steps=1000, metrics=94)
    for step in range(1, 1001, 100):
        save_step(run / "experience", step, two_samples(0))
    data = page_of(output_of, tmp_path / "page.html", run)
    assert len(data["names"]) >= 100 and len(data["runs"][0]["steps"]) == 1001
    assert data["runs"][0]["histograms"]["steps"] == list(range(1, 1001, 100))
    assert (tmp_path / "page.html").stat().st_size < LARGEST_BYTES


@pytest.mark.waits
def test_page_imports_no_large_modules(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    code = (
        "import sys; from megappo.cli import main; main(sys.argv[1:]); "
        "print(sys.modules.keys() & {'torch', 'numpy', 'pyarrow', 'transformers', 'matplotlib'})"
    )
    command = [sys.executable, "-c", code, "report", str(run), "--html", str(tmp_path / "page.html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_damaged_files_remove_only_their_parts(tmp_path: Path, output_of: Callable[..., str]) -> None:
    """Pipes and devices would block a reader, and are skipped too."""
    run = make_run(tmp_path / "run")
    save_step(run / "experience", 1, two_samples(0))
    (run / "experience" / "step-000001" / "rank-00000.parquet").write_text("no")
    for name in ("samples.jsonl", "config.yaml", "jumps.jsonl"):
        (run / name).unlink()
    os.mkfifo(run / "samples.jsonl")
    os.mkfifo(run / "config.yaml")
    (run / "jumps.jsonl").symlink_to("/dev/zero")
    (run / "profile" / "step-000003.md").write_bytes(b"\xff")
    run_data = page_of(output_of, tmp_path / "page.html", run)["runs"][0]
    assert [note.split(" cannot ")[0] for note in run_data["notes"]] == [
        "The settings", "The updates that stood out", "The profile", "The distributions", "The saved samples",
        "The samples",
    ]  # fmt: skip
    assert run_data["samples"] == run_data["jumps"] == run_data["advice"] == [] and run_data["histograms"] is None
    assert dict(run_data["metrics"])["reward/mean"][1] == 1


def test_missing_run_or_folder_is_reported(tmp_path: Path, errors_of: Callable[..., str]) -> None:
    run, page = make_run(tmp_path / "run"), tmp_path / "page.html"
    for options in (["--html", page], [run]):
        message = f"megappo: error: {tmp_path} holds no metrics.jsonl; name the directory of a run\n"
        assert errors_of("report", tmp_path, *options) == message
    for place in (tmp_path / "none" / "page.html", tmp_path):
        assert f"--html is '{place}', which cannot be written" in errors_of("report", run, "--html", place)
    (run / "metrics.jsonl").write_text("")
    assert "has no step yet" in errors_of("report", run, "--html", page)
    assert not page.exists()


def test_evaluations_are_first(tmp_path: Path, output_of: Callable[..., str]) -> None:
    """The page names the score above which a response is right."""
    sets = "{math: {source: a.jsonl, samples: 4, temperature: 1.0, pass_at: [4, 1], right_above: 0.75}}"
    run = make_run(tmp_path / "run", f"data.validation_sets={sets}", steps=2)
    results = {"eval/math/pass@4": 0.5, "eval/math/pass@1": 0.25, "eval/math/reward_mean": 0.375}
    lines = [{"step": 1, "reward/mean": 1.0, **results}, {"step": 2, "reward/mean": 2.0}]
    write_lines(run / "metrics.jsonl", *lines)
    data = page_of(output_of, tmp_path / "page.html", run)
    names = ["eval/math/reward_mean", "eval/math/pass@1", "eval/math/pass@4", "reward/mean"]
    assert data["first"] == names
    assert data["runs"][0]["result"].split("; ") == [
        "eval math 0.375 at first, 0.375 in the last evaluation",
        "math pass@1 (score > 0.75) 0.250 at first, 0.250 in the last evaluation",
        "math pass@4 (score > 0.75) 0.500 at first, 0.500 in the last evaluation",
        "reward/mean 1.000 at first, 1.500 in the last 2 steps",
    ]


def test_picture_has_the_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture has the first metrics of a page, or one metric. Special characters in names are not read as
    formulas."""
    pytest.importorskip("matplotlib")
    one = make_run(tmp_path / "one").rename(tmp_path / "_one $x")
    runs = [str(one), str(make_run(tmp_path / "two"))]
    file = tmp_path / "curves.png"
    assert main(["report", *runs, "--png", str(file)]) == 0
    of_several = len(file.read_bytes())
    assert file.read_bytes().startswith(b"\x89PNG")
    write_lines(tmp_path / "two" / "metrics.jsonl", {"step": 1, "$_{": 1.0}, {"step": 2, "$_{": "nan"})
    assert main(["report", *runs, "--png", str(file), "--metric", "$_{"]) == 0
    assert 1_000 < len(file.read_bytes()) < of_several
    capsys.readouterr()
    assert main(["report", *runs, "--png", str(file), "--metric", "reward/men"]) == 2
    assert "no run has the metric 'reward/men'; did you mean reward/mean?" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", *runs, "--png", str(file)]) == 2
    assert "--png needs matplotlib, which is not installed; pip install matplotlib" in capsys.readouterr().err


@needs_browser
@pytest.mark.waits
def test_text_of_a_model_is_not_interpreted(tmp_path: Path, output_of: Callable[..., str]) -> None:
    """Check every part of the page: names of metrics and runs, tokens, prompts, answers and reasons."""
    run = make_run(tmp_path / "a<b>run")
    write_lines(run / "metrics.jsonl", *({"step": step, HOSTILE: 1.0, "__proto__": 2.0} for step in range(4)))
    saved = two_samples(0)
    rollouts = replace(saved.experience.scored.rollouts, raw_responses=(HOSTILE, "9<eos>"))
    experience = replace(saved.experience, scored=replace(saved.experience.scored, rollouts=rollouts))
    save_step(run / "experience", 2, replace(saved, experience=experience), text_of=lambda token: HOSTILE)
    page_of(output_of, tmp_path / "page.html", run)
    with browser(tmp_path / "profile-of-chromium") as page:
        page.open(tmp_path / "page.html")
        assert all(marks > 0 for marks in page.charts().values())
        names = page.value("[...document.querySelectorAll('#cards h3')].map(head => head.textContent)")
        assert names == [HOSTILE, "__proto__"]
        text = page.value("document.querySelector('.tokens').textContent")
        assert text.startswith("</script><img src=x onerror=")
        assert page.value("document.querySelectorAll('img, iframe, main b').length") == 0
        assert page.value("document.title") == "a<b>run - megappo report"
        page.value("document.querySelector('#picker').open = true")
        assert page.out_of_reach() == []
        assert page.complaints == [] and page.requests == [(tmp_path / "page.html").as_uri()]
        assert page.value("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
        assert any("Content Security Policy" in complaint for complaint in page.complaints)


@needs_browser
@pytest.mark.waits
def test_chart_can_be_hidden_while_drawn(tmp_path: Path, output_of: Callable[..., str]) -> None:
    """plotly reads its layout again after drawing."""
    run = make_run(tmp_path / "run")
    write_lines(run / "metrics.jsonl", *({"step": step, "reward/mean": step / 9} for step in range(40)))
    page_of(output_of, tmp_path / "page.html", run)
    with browser(tmp_path / "profile") as page:
        page.open(tmp_path / "page.html")
        assert page.value(HIDE_WHILE_DRAWN) == "purged"
        assert page.complaints == []


HIDE_WHILE_DRAWN = """
(async () => {
  const [{ place }] = cards.values(), drawing = drawings.get(place);
  for (let n = 0; n < 3; n++) { drawing.isInView = drawing.isStale = true; draw(place); }
  forget(place);
  while (place._fullLayout) await new Promise((done) => setTimeout(done, 20));
  await new Promise((done) => setTimeout(done, 200));
  return "purged";
})()
"""


def run_of(directory: Path, metric: str, values: Mapping[int, float]) -> str:
    """Write a run with a metric that has these values at these steps, and no value at other steps. Return its
    directory."""
    directory.mkdir()
    lines = ({"step": step, **({metric: values[step]} if step in values else {})} for step in range(max(values) + 1))
    write_lines(directory / "metrics.jsonl", *lines)
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


def test_runs_are_compared_at_their_last_common_step(tmp_path: Path, output_of: Callable[..., str]) -> None:
    one = run_of(tmp_path / "one", "eval/reward_mean", {0: 0.1, 10: 0.5, 20: 0.4})
    two = run_of(tmp_path / "two", "eval/reward_mean", {0: 0.2, 10: 0.25})
    output = output_of("report", one, two, "--metric", "eval/reward_mean")
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
def test_unknown_metric_is_reported(metric: str, remedy: str, tmp_path: Path, errors_of: Callable[..., str]) -> None:
    run = run_of(tmp_path / "run", "reward/mean", {1: 0.5})
    message = f"megappo: error: the run in {run} has no finite value of the metric '{metric}'; {remedy}\n"
    assert errors_of("report", run, "--metric", metric) == message


def test_line_without_an_end_is_reported(tmp_path: Path, errors_of: Callable[..., str]) -> None:
    """Such a line could exhaust the memory."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{")
    os.truncate(run / "metrics.jsonl", 2**40)
    assert "has a line of more than 67108864 characters; restore the file of the run" in errors_of("report", run)


def test_metrics_with_invalid_text_are_reported(tmp_path: Path, errors_of: Callable[..., str]) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "reward/mean": 1}\n{"step": 2, "\xff": 1}\n')
    errors = errors_of("report", tmp_path)
    assert "metrics.jsonl is not UTF-8 (" in errors and errors.count("\n") == 1
