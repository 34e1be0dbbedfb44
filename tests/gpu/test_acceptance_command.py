"""The acceptance command runs whole on a CPU, and nothing that goes wrong in a step ends the others."""

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
"""tests/sglang runs the third part: its servers take long to start."""


def step(name: str, *, seconds: float = 0.0, most: float = 60.0, part: int = 1) -> Step:
    return Step(name, part, f"tests.gpu.steps_that_fail:{name}", seconds, most, "")


def run(folder: Path, steps: Sequence[Step], seconds: float = 120.0, *, tiny: bool = False) -> Report:
    report = Report(folder / "table", {"date": "today"})
    place = Place("cpu", tiny, str(folder))
    run_steps(steps, place, report, seconds=seconds, given=environment(), log=folder / "log")
    return report


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of the first two parts on a CPU."""
    out = tmp_path_factory.mktemp("acceptance")
    words = ("--device", "cpu", "--tiny", "--minutes", "30", "--out", out, "--only", *ON_A_CPU)  # none of the third
    done = start("tests.gpu.gpu_acceptance", *words, timeout_seconds=1800)
    logs = "".join(path.read_text()[-3000:] for path in out.glob("*.log"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:] + logs
    tables = [out / f"gpu-acceptance-part{part}" for part in (1, 2)]
    rows = [row for table in tables for row in json.loads(table.with_suffix(".json").read_text())["rows"]]
    shown = [line for t in tables for line in t.with_suffix(".md").read_text().splitlines() if line.startswith("| ")]
    assert len(shown) == len(rows) + len(tables), "every row is a line, under one heading each"
    return rows


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_step_runs_on_a_cpu(accepted: list[dict[str, Any]]) -> None:
    assert list(dict.fromkeys(row["step"] for row in accepted)) == ON_A_CPU
    assert not [row for row in accepted if row["verdict"] == "failed"]
    assert all(row["what"] and row["result"] for row in accepted)
    skipped = {row["step"] for row in accepted if row["verdict"] == "skipped"}
    packages = {"machine", "kernels", "kernel-times", "switches"}
    assert skipped <= packages, "only steps that need missing packages or larger machines are skipped"
    held = {row["step"] for row in accepted if row["verdict"] == "ok"}
    assert held == set(ON_A_CPU) - {"machine", "kernel-times", "mfu"}, "those only measure on a CPU"


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
def test_what_must_hold_is_held_to_something(accepted: list[dict[str, Any]], name: str, what: str) -> None:
    (row,) = [row for row in accepted if (row["step"], row["what"]) == (name, what)]
    assert row["verdict"] == "ok"
    if "bound" in row["numbers"]:
        errors = [value for key, value in row["numbers"].items() if key not in ("bound", "share_of_weights")]
        assert errors and max(errors) <= row["numbers"]["bound"] < 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="needs a machine without Transformer Engine")
def test_a_switch_that_changes_no_code_is_not_compared(accepted: list[dict[str, Any]]) -> None:
    """Without Transformer Engine and Apex, `model.accelerations` changes nothing."""
    (row,) = [row for row in accepted if row["step"] == "switches" and row["what"].startswith("accelerations")]
    assert row["verdict"] == "skipped" and "both sides run the same code: torch's layers" in row["result"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_updates_move_weights_by_more_than_their_bound(accepted: list[dict[str, Any]]) -> None:
    """Otherwise a step that does nothing would be as the oracle's."""
    changed = [row["numbers"] for row in accepted if "weights after 4 updates" in row["what"]]
    assert len(changed) == 4 and all(numbers["share_of_weights"] > 1e-4 for numbers in changed)


@pytest.mark.slow
def test_a_trainer_leaves_its_memory_to_the_next(tmp_path: Path) -> None:
    report = Report(tmp_path / "table", {})
    place = Place("cpu", True, str(tmp_path))
    run_steps([step("leaves_nothing")], place, report, seconds=300, given=environment(), log=tmp_path / "log")
    assert [row.verdict for row in report.rows] == ["ok"], report.rows


def test_servers_are_skipped_where_sglang_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name on the path of imports, as our own tests have one, is none."""
    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(Skip, match="not installed"):
        next(sleep_train_wake(Place("cpu", True, str(tmp_path))))


def missing(name: str) -> str:
    raise PackageNotFoundError(name)


def test_a_step_that_goes_wrong_ends_alone(tmp_path: Path) -> None:
    names = ("sound", "raises", "sound", "dies", "unsound", "cannot", "sound")
    report = run(tmp_path, [step(name) for name in names])
    found = [(row.step, row.what, row.verdict) for row in report.rows]
    assert found == [
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
    assert len(set(processes)) == 3, "nothing runs on in a process in which something went wrong"
    assert report.verdict == "failed"
    assert "Traceback" in (tmp_path / "log").read_text()


def test_steps_with_servers_have_processes_of_their_own(tmp_path: Path) -> None:
    report = run(tmp_path, [step("sound", part=part) for part in (2, 2, 3, 3, 2)])
    first, second, *others = (row.numbers["pid"] for row in report.rows)
    assert first == second and len({first, *others}) == 4
    report = run(tmp_path, [step("sound", part=part) for part in (2, 3, 3)], tiny=True)
    assert len({row.numbers["pid"] for row in report.rows}) == 1, "of tiny sizes nothing is left that takes room"


def test_a_step_has_a_deadline_and_all_have_a_budget(tmp_path: Path) -> None:
    started = time.monotonic()
    steps = [step("hangs", most=2), step("sound"), step("hangs"), step("sound", seconds=30)]
    report = run(tmp_path, steps, seconds=25)
    assert time.monotonic() - started < 60
    found = [(row.step, row.verdict, row.result) for row in report.rows if row.what != "before"]
    assert found[0] == ("hangs", "failed", "failed: it did not end within 2 s")
    assert found[1][:2] == ("sound", "measured")
    assert found[2][1] == "skipped" and "the time of this part ended" in found[2][2]
    assert found[3][1] == "skipped" and found[3][2].startswith("needs 30 s, of 25 s for this part 0 are left")


def test_a_number_that_is_none_is_within_nothing() -> None:
    assert within("x", {"a": 0.1, "b": float("nan")}, 1.0).verdict == "failed"
    assert within("x", {"a": 0.1, "b": 2.0}, 1.0).result == "b 2.0e+00, bound 1.0e+00"
    assert within("x", {"a": 0.1, "b": 1.0}, 1.0).verdict == "ok"


def test_two_parts_make_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part, row in ((1, measured("rate", "2", rate=2.0)), (2, judged("sum", False, "3, bound 2", sum=3.0))):
        report = Report(tmp_path / f"part{part}", {"device": "a GPU", "part": part})
        report.add("step", row)
    words = ["--join", str(tmp_path / "part1.json"), str(tmp_path / "part2.json"), "--out", str(tmp_path)]
    assert gpu_acceptance.main(words) == 1
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'gpu-acceptance'}.md: failed\n")
    text = (tmp_path / "gpu-acceptance.md").read_text()
    assert "- device: a GPU\n- part: 1; 2\n" in text
    assert "| step | rate | 2 | measured |\n| step | sum | 3, bound 2 | failed |\n" in text
    assert len(json.loads((tmp_path / "gpu-acceptance.json").read_text())["rows"]) == 2


def write_wheel(folder: Path, name: str, *, tag: str = "py3-none-any") -> None:
    """A package of one module that says its name."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as file:
        file.writestr(f"{name}.py", f"NAME = {name!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: absent\n")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
        file.writestr(f"{info}/RECORD", "")


def test_wheels_are_installed_where_only_the_steps_see_them(tmp_path: Path) -> None:
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


def test_a_folder_of_wheels_is_neither_empty_nor_larger_than_what_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="holds no wheels"):
        list(wheels.install(tmp_path, tmp_path / "site"))
    write_wheel(tmp_path, "acceptance_made_up")
    monkeypatch.setattr(wheels, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="at most 0; leave some out"):
        list(wheels.install(tmp_path, tmp_path / "site"))


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_acceptance, "sees_cuda", lambda given: False)
    assert gpu_acceptance.main(["--part", "1", "--out", str(tmp_path)]) == 2
    assert "torch shows no CUDA device here; add --device cpu --tiny" in capsys.readouterr().err


def test_steps_have_names_of_their_own_and_fit_their_part() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for part in gpu_acceptance.PARTS:
        assert sum(step.seconds for step in STEPS if step.part == part) < 570, "expected to fit into ten minutes"
    assert gpu_acceptance.main(["--list"]) == 0
    described = (ROOT / "tests/gpu/README.md").read_text()
    assert all(f"\n| {step.name} | {step.part} |" in described for step in STEPS)
