"""The acceptance command runs on a CPU, and a failure in a step does not end the other steps."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import gpu_acceptance
from tests.gpu.acceptance import wheels
from tests.gpu.acceptance.registry import STEPS, Place, Step
from tests.gpu.acceptance.runner import environment, run_steps
from tests.gpu.acceptance.servers import sleep_train_wake
from tests.gpu.acceptance.table import Report, Skip, judged, measured, within
from tests.support.harness import start
from tests.support.places import ROOT

pytestmark = pytest.mark.waits
ON_A_CPU = [step.name for step in STEPS if step.part < 3]
"""The steps of the first two parts. tests/sglang runs the third part, whose servers start slowly."""


def step(name: str, *, seconds: float = 0.0, most: float = 60.0, part: int = 1) -> Step:
    return Step(name, part, f"tests.gpu.steps_that_fail:{name}", seconds, most, "")


def run(folder: Path, steps: Sequence[Step], seconds: float = 120.0, *, tiny: bool = False) -> Report:
    report = Report(folder / "table", {"date": "today"})
    place = Place("cpu", tiny, str(folder))
    run_steps(steps, place, report, seconds=seconds, variables=environment(), log=folder / "log")
    return report


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the rows of the first two parts on a CPU."""
    out = tmp_path_factory.mktemp("acceptance")
    arguments = (
        "--device",
        "cpu",
        "--tiny",
        "--minutes",
        "30",
        "--out",
        out,
        "--only",
        *ON_A_CPU,
    )  # without the third part
    done = start("tests.gpu.gpu_acceptance", *arguments, timeout_seconds=1800)
    logs = "".join(path.read_text()[-3000:] for path in out.glob("*.log"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:] + logs
    tables = [out / f"gpu-acceptance-part{part}" for part in (1, 2)]
    rows = [row for table in tables for row in json.loads(table.with_suffix(".json").read_text())["rows"]]
    shown = [line for t in tables for line in t.with_suffix(".md").read_text().splitlines() if line.startswith("| ")]
    assert len(shown) == len(rows) + len(tables), "every row is a line, and every table has a heading"
    return rows


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_steps_run_on_a_cpu(accepted: list[dict[str, Any]]) -> None:
    assert list(dict.fromkeys(row["step"] for row in accepted)) == ON_A_CPU
    assert not [row for row in accepted if row["verdict"] == "failed"]
    assert all(row["what"] and row["result"] for row in accepted)
    skipped = {row["step"] for row in accepted if row["verdict"] == "skipped"}
    packages = {"machine", "kernels", "kernel-times", "switches"}
    assert skipped <= packages, "only steps with missing packages or insufficient machines are skipped"
    judged_steps = {row["step"] for row in accepted if row["verdict"] == "ok"}
    assert judged_steps == set(ON_A_CPU) - {"machine", "kernel-times", "mfu"}, "these steps only measure on a CPU"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("kernels", "no rows, N=0 H=32 V=131 bfloat16"),
        ("kernels", "linear_logprob gradients, N=9 H=32 V=1000 float32"),
        ("kernels", "ppo_head_loss twice, N=9 H=32 V=1000 bfloat16"),
        ("oracle", "0.6B, float32: actor's weights after 4 updates"),
        ("oracle", "1.5B, float32: critic's weights after 4 updates"),
        ("two-processes", "exchange, 2 ranks"),
        ("two-processes", "head over 2 ranks, float32: gradients"),
        ("switches", "recompute: full: changes of weights, float32"),
        ("experts", "layer, 32 x 16 float32"),
        ("packs", "16 x 4 tokens, float32: as alone"),
        ("counts", "forward: waits per layer"),
        ("memory", "0.6B, float32: weights, gradients, optimizers"),
        ("resume", "metrics of all steps, killed and continued"),
    ],
)
def test_checked_rows_have_meaningful_bounds(accepted: list[dict[str, Any]], name: str, what: str) -> None:
    (row,) = [row for row in accepted if (row["step"], row["what"]) == (name, what)]
    assert row["verdict"] == "ok"
    if "bound" in row["numbers"]:
        errors = [value for key, value in row["numbers"].items() if key not in ("bound", "share_of_weights")]
        assert errors and max(errors) <= row["numbers"]["bound"] < 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="needs a machine without Transformer Engine")
def test_switch_without_effect_is_skipped(accepted: list[dict[str, Any]]) -> None:
    """Without Transformer Engine and Apex, `model.accelerations` changes nothing."""
    (row,) = [row for row in accepted if row["step"] == "switches" and row["what"].startswith("accelerations")]
    assert row["verdict"] == "skipped" and "both sides run the same code: torch's layers" in row["result"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_updates_change_the_weights_measurably(accepted: list[dict[str, Any]]) -> None:
    """Without this check, a step without updates could agree with the oracle."""
    changed = [row["numbers"] for row in accepted if "weights after 4 updates" in row["what"]]
    assert len(changed) == 4 and all(numbers["share_of_weights"] > 1e-4 for numbers in changed)


@pytest.mark.slow
def test_trainer_releases_its_memory(tmp_path: Path) -> None:
    report = Report(tmp_path / "table", {})
    place = Place("cpu", True, str(tmp_path))
    run_steps([step("leaves_nothing")], place, report, seconds=300, variables=environment(), log=tmp_path / "log")
    assert [row.verdict for row in report.rows] == ["ok"], report.rows


def test_servers_are_skipped_without_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named sglang on the import path, such as tests/sglang, is not the package."""
    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(Skip, match="not installed"):
        next(sleep_train_wake(Place("cpu", True, str(tmp_path))))


def missing(name: str) -> str:
    raise PackageNotFoundError(name)


def test_failed_step_does_not_affect_other_steps(tmp_path: Path) -> None:
    names = ("sound", "raises", "sound", "dies", "unsound", "cannot", "sound")
    report = run(tmp_path, [step(name) for name in names])
    rows = [(row.step, row.what, row.verdict) for row in report.rows]
    assert rows == [
        ("sound", "process", "measured"),
        ("raises", "before", "measured"),
        ("raises", "the step", "failed"),
        ("sound", "process", "measured"),
        ("dies", "before", "measured"),
        ("dies", "the step", "failed"),
        ("unsound", "sum", "failed"),
        ("cannot", "before", "measured"),
        ("cannot", "the step", "skipped"),
        ("sound", "process", "measured"),
    ]
    sentence = next(row.result for row in report.rows if row.step == "raises" and row.verdict == "failed")
    assert sentence == "failed: ValueError: a bad | value over two lines"
    assert "a bad / value over two lines" in (tmp_path / "table.md").read_text()
    processes = [row.numbers["pid"] for row in report.rows if row.step == "sound"]
    assert len(set(processes)) == 3, "a process with a failure is not used again"
    assert report.verdict == "failed"
    assert "Traceback" in (tmp_path / "log").read_text()


def test_server_steps_have_separate_processes(tmp_path: Path) -> None:
    report = run(tmp_path, [step("sound", part=part) for part in (2, 2, 3, 3, 2)])
    first, second, *others = (row.numbers["pid"] for row in report.rows)
    assert first == second and len({first, *others}) == 4
    report = run(tmp_path, [step("sound", part=part) for part in (2, 3, 3)], tiny=True)
    assert len({row.numbers["pid"] for row in report.rows}) == 1, "tiny steps share a process"


def test_time_limits_per_step_and_in_total(tmp_path: Path) -> None:
    started = time.monotonic()
    steps = [step("hangs", most=2), step("sound"), step("hangs"), step("sound", seconds=30)]
    report = run(tmp_path, steps, seconds=25)
    assert time.monotonic() - started < 60
    rows = [(row.step, row.verdict, row.result) for row in report.rows if row.what != "before"]
    assert rows[0] == ("hangs", "failed", "failed: it did not end within 2 s")
    assert rows[1][:2] == ("sound", "measured")
    assert rows[2][1] == "skipped" and "the time of this part ended" in rows[2][2]
    assert rows[3][1] == "skipped" and rows[3][2].startswith("needs 30 s, of 25 s for this part 0 are left")


def test_nan_exceeds_every_bound() -> None:
    assert within("x", {"a": 0.1, "b": float("nan")}, 1.0).verdict == "failed"
    assert within("x", {"a": 0.1, "b": 2.0}, 1.0).result == "b 2.0e+00, bound 1.0e+00"
    assert within("x", {"a": 0.1, "b": 1.0}, 1.0).verdict == "ok"


def test_join_of_two_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part, row in ((1, measured("rate", "2", rate=2.0)), (2, judged("sum", False, "3, bound 2", sum=3.0))):
        report = Report(tmp_path / f"part{part}", {"device": "a GPU", "part": part})
        report.add("step", row)
    arguments = ["--join", str(tmp_path / "part1.json"), str(tmp_path / "part2.json"), "--out", str(tmp_path)]
    assert gpu_acceptance.main(arguments) == 1
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'gpu-acceptance'}.md: failed\n")
    text = (tmp_path / "gpu-acceptance.md").read_text()
    assert "- device: a GPU\n- part: 1; 2\n" in text
    assert "| step | rate | 2 | measured |\n| step | sum | 3, bound 2 | failed |\n" in text
    assert len(json.loads((tmp_path / "gpu-acceptance.json").read_text())["rows"]) == 2


def write_wheel(folder: Path, name: str, *, tag: str = "py3-none-any") -> None:
    """Write a wheel of a package with one module that contains its name."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as file:
        file.writestr(f"{name}.py", f"NAME = {name!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: absent\n")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
        file.writestr(f"{info}/RECORD", "")


def test_wheels_are_installed_only_for_the_steps(tmp_path: Path) -> None:
    folder, site = tmp_path / "wheels", tmp_path / "site"
    folder.mkdir()
    write_wheel(folder, "acceptance_made_up")
    write_wheel(folder, "acceptance_of_another_python", tag="cp27-cp27m-win32")
    rows = {row.what: row for row in wheels.install(folder, site)}
    assert rows["acceptance_made_up"].verdict == "measured"
    assert "does not install here" in rows["acceptance_of_another_python"].result
    code = "import acceptance_made_up as m; print(m.NAME)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(site), capture_output=True, text=True, check=False
    )
    assert done.stdout == "acceptance_made_up\n", done.stderr


def test_empty_and_large_folders_of_wheels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="contains no wheels"):
        list(wheels.install(tmp_path, tmp_path / "site"))
    write_wheel(tmp_path, "acceptance_made_up")
    monkeypatch.setattr(wheels, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="must be at most 0; remove some"):
        list(wheels.install(tmp_path, tmp_path / "site"))


def test_missing_gpu_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_acceptance, "sees_cuda", lambda variables: False)
    assert gpu_acceptance.main(["--part", "1", "--out", str(tmp_path)]) == 2
    assert "torch shows no CUDA device here; add --device cpu --tiny" in capsys.readouterr().err


def test_step_names_are_unique_and_fit_their_part() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for part in gpu_acceptance.PARTS:
        assert sum(step.seconds for step in STEPS if step.part == part) < 570, (
            "the sum of a part must be below ten minutes"
        )
    assert gpu_acceptance.main(["--list"]) == 0
    described = (ROOT / "tests/gpu/README.md").read_text()
    assert all(f"\n| {step.name} | {step.part} |" in described for step in STEPS)
