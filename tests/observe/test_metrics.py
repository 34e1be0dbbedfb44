"""Metrics of a run: files, loggers, descriptions, and changes of settings between the parts of a run."""

from __future__ import annotations

import json
import math
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megappo.commands.report import report
from megappo.errors import ConfigError
from megappo.files.json_values import JSONValue
from megappo.megatron.roles import Update
from megappo.observe.changes import change_notes, read_changes, record_changes
from megappo.observe.metric_docs import METRICS
from megappo.observe.metrics import MetricsLog, last_records, read_metrics
from megappo.ppo.updates import step_metrics
from megappo_kernels.losses import ppo_value_loss
from tests.observe.conftest import FakeWandb
from tests.support.events import scalars
from tests.support.kernels import token_loss
from tests.support.places import ROOT

FILES_ONLY: dict[str, Any] = {"tensorboard": False}


def test_line_starts_with_step_and_has_sorted_names(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run", "r", {}, **FILES_ONLY)
    log.log(3, {"b": 2.0, "a": 1.0})
    # The line is flushed and can be read before the end of the run.
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 3, "a": 1.0, "b": 2.0}\n'
    log.close()
    log.close()


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "jumps.jsonl"])
def test_folder_instead_of_a_file_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name} is not a file, but the run writes to this path; remove it"):
        MetricsLog(tmp_path, "r", {}, **FILES_ONLY)


def test_nonfinite_values_are_valid_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "r", {}, **FILES_ONLY)
    log.log(1, {"x": math.nan, "y": math.inf, "z": -math.inf})
    log.log_samples(1, [{"score": math.nan, "response": "\ud800 \u2028 é"}])
    log.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "x": "nan", "y": "inf", "z": "-inf"}
    record = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert math.isnan(record["x"]) and record["y"] == math.inf and record["z"] == -math.inf
    sample = json.loads((tmp_path / "samples.jsonl").read_bytes(), parse_constant=refuse)
    assert sample == {"step": 1, "score": "nan", "response": "\ud800 \u2028 é"}


@st.composite
def metrics(draw: DrawFn) -> dict[str, float]:
    return draw(st.dictionaries(st.sampled_from(sorted(METRICS)), st.floats(allow_nan=False)))


@given(st.lists(metrics(), max_size=5))
def test_metrics_round_trip(tmp_path_factory: pytest.TempPathFactory, steps: list[dict[str, float]]) -> None:
    directory = tmp_path_factory.mktemp("run")
    log = MetricsLog(directory, "r", {}, **FILES_ONLY)
    for step, numbers in enumerate(steps, start=1):
        log.log(step, numbers)
    log.close()
    expected = [{"step": step, **numbers} for step, numbers in enumerate(steps, start=1)]
    assert read_metrics(directory / "metrics.jsonl") == expected


def test_metrics_of_a_killed_run_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a')
    assert read_metrics(path) == [{"step": 1, "a": 1.0}]
    log = MetricsLog(tmp_path, "r", {}, **FILES_ONLY)
    log.log(2, {"a": 2.0})
    log.close()
    assert read_metrics(path) == [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}]


def test_resumed_run_removes_later_steps(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "r", {}, **FILES_ONLY)
    for step in range(5):
        log.log(step, {"a": math.nan})
        log.log_samples(step, [{"response": f"\ud800 \u2028 \r\n {step}"}] * 2)
        log.log_jump(step, {"reasons": ("a", "b")})
    lines = {path.name: path.read_bytes().splitlines(keepends=True) for path in tmp_path.iterdir()}
    log.close()
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 5, "respo')  # the run was killed during a write
    log = MetricsLog(tmp_path, "r", {}, **FILES_ONLY)
    log.truncate_after(2)
    # The files are truncated at once, exactly, and no other files remain.
    contents = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert contents == {
        "metrics.jsonl": b"".join(lines["metrics.jsonl"][:3]),
        "samples.jsonl": b"".join(lines["samples.jsonl"][:6]),
        "jumps.jsonl": b"".join(lines["jumps.jsonl"][:3]),
    }
    log.log(3, {"a": 3.0})
    log.log_samples(3, [{"response": "again"}])
    log.truncate_after(3)  # nothing to remove
    log.close()
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert (tmp_path / "samples.jsonl").read_text().endswith('{"step": 3, "response": "again"}\n')


def test_failed_truncation_does_not_change_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path, "r", {}, **FILES_ONLY)
    log.log(1, {"a": 1.0})
    log.log(2, {"a": 2.0})
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        log.truncate_after(1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_invalid_line_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_metrics(path)


def test_last_records_of_a_long_file(tmp_path: Path) -> None:
    """The samples of a long run do not fit into one string."""
    path = tmp_path / "samples.jsonl"
    with path.open("w") as file:
        for step in range(260):
            file.write(json.dumps({"step": step, "response": "a" * 2**20}) + "\n")
    assert path.stat().st_size > 2**28
    assert [record["step"] for record in last_records(path, 2)] == [258, 259]
    path.unlink()


def test_tensorboard_removes_later_steps_of_a_resumed_run(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "r", {})
    for step in range(1, 5):
        log.log(step, {"reward/mean": 0.25})
    log.close()
    log = MetricsLog(tmp_path, "r", {})
    log.truncate_after(2)
    log.log(3, {"reward/mean": 0.5})
    log.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.25), (3, 0.5)]


def test_missing_wandb_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"logging\.wandb_project is 'p', but wandb .* '.\[wandb\]'"):
        MetricsLog(tmp_path, "r", {}, tensorboard=False, wandb_project="p")
    assert not (tmp_path / "metrics.jsonl").exists()


class Listing:
    """Logger of a user that records its calls."""

    def __init__(self, *, directory: Path, run_name: str, config: dict[str, object], into: list[object]) -> None:
        if "refuse" in config:
            raise KeyError("no account")
        self._into = into
        into.append((directory.name, run_name, config))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._into.append((step, metrics))

    def forget_after(self, step: int) -> None:
        self._into.append(("forget", step))

    def close(self) -> None:
        self._into.append("closed")


def test_custom_logger_receives_the_run(tmp_path: Path) -> None:
    calls: list[Any] = []
    log = MetricsLog(tmp_path, "r", {"a": 1}, tensorboard=False, loggers={f"{__name__}:Listing": {"into": calls}})
    log.log(1, {"a": 1.0})
    log.truncate_after(0)
    log.close()
    assert calls == [(tmp_path.name, "r", {"a": 1}), (1, {"a": 1.0}), ("forget", 0), "closed"]


@pytest.mark.parametrize(
    ("path", "options", "config", "message"),
    [
        (f"{__name__}:Listin", {}, {}, r"has no function 'Listin'; did you mean '.*:Listing'"),
        (f"{__name__}:Listing", {"inot": []}, {}, r"cannot be called with \(directory=, run_name=, config=, inot=\)"),
        (f"{__name__}:Listing", {"into": []}, {"refuse": 1}, r"failed \(KeyError: 'no account' \(.*\)\); fix the"),
        ("builtins:dict", {}, {}, r"has no log and forget_after and close; implement the methods of megappo\.api"),
    ],
)
def test_invalid_logger_is_an_error(
    tmp_path: Path, path: str, options: dict[str, JSONValue], config: dict[str, JSONValue], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"logging\.loggers '.*{message}"):
        MetricsLog(tmp_path, "r", config, tensorboard=False, loggers={path: options})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_wandb_receives_the_run(tmp_path: Path, wandb: FakeWandb) -> None:
    log = MetricsLog(tmp_path, "r", {}, tensorboard=False, wandb_project="p")
    log.log(1, {"a": 1.0})
    log.close()
    log.close()
    assert wandb.calls[1:] == [("log", (1, {"a": 1.0})), ("finish", None)] and wandb.begun[0]["project"] == "p"


def test_failed_start_of_wandb_is_an_error(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.broken = ("init",)
    message = r"wandb_project is 'p'.* not configured\\n.*wandb login.* WANDB_MODE=offline"
    with pytest.raises(ConfigError, match=message):
        MetricsLog(tmp_path, "r", {}, tensorboard=False, wandb_project="p")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_run_continues_without_wandb(tmp_path: Path, wandb: FakeWandb, capsys: pytest.CaptureFixture[str]) -> None:
    log = MetricsLog(tmp_path, "r", {}, tensorboard=False, wandb_project="p")
    for step, wandb.broken in enumerate(((), ("log",), ("log",), (), ("log", "finish")), start=1):
        log.log(step, {"a": 1.0})
    log.close()
    lines = capsys.readouterr().err.splitlines()
    assert [sentence.removeprefix("megappo: the run at Weights & Biases ").partition(":")[0] for sentence in lines] == [
        "cannot be written", "is written again", "cannot be written", "cannot be finished",
    ]  # fmt: skip
    assert wandb.logged == [(1, {"a": 1.0}), (4, {"a": 1.0})]
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_full_disk_loses_lines_but_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    messages: list[str] = []
    log = MetricsLog(tmp_path, "r", {})
    log.log(1, {"a": 1.0})
    with monkeypatch.context() as disk:
        limit, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, limit[1]))
        disk.setattr("megappo.observe.loggers.show_message", messages.append)
        try:
            for step in (2, 3):
                log.log(step, {"a": float(step)})
                log.log_samples(step, [{"response": "a" * 100}])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, before)
    log.log(4, {"a": 4.0})
    log.close()
    assert [sentence.partition(" cannot be written: [Errno 27] File too large")[0] for sentence in messages] == [
        str(tmp_path / "metrics.jsonl"), "TensorBoard's file", str(tmp_path / "samples.jsonl"),
    ]  # fmt: skip
    assert capsys.readouterr().err.count("is written again") == 2
    # Only complete lines are in the file, although the disk had space for a part of a line.
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 4]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1 and scalars(tmp_path, "a") == [(1, 1.0), (4, 4.0)]


def test_emptied_file_is_continued(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "r", {}, **FILES_ONLY)
    log.log(1, {"a": 1.0})
    (tmp_path / "metrics.jsonl").write_text("")
    log.log(2, {"a": 2.0})
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 2, "a": 2.0}]


def test_samples_can_contain_nonfinite_numbers(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "r", {}, **FILES_ONLY)
    log.log_samples(1, [{"conversation": [{"arguments": {"x": math.nan}}, (math.inf, 1)]}])
    log.close()
    assert json.loads((tmp_path / "samples.jsonl").read_text())["conversation"] == [
        {"arguments": {"x": "nan"}}, ["inf", 1],
    ]  # fmt: skip


def test_metrics_in_the_source_are_documented() -> None:
    prefixes = {name.split("/")[0] for name in METRICS if "/" in name}
    literal = re.compile(r'"-?(' + "|".join(sorted(prefixes)) + r')/([a-z0-9_]+)"')
    written = {
        "/".join(parts)
        for path in (ROOT / "megappo").rglob("*.py")
        for parts in literal.findall(path.read_text(encoding="utf-8"))
    }
    assert "mismatch/k3" in written
    assert written <= set(METRICS)


def test_timed_stages_are_documented() -> None:
    source = "".join((ROOT / "megappo" / "ppo" / name).read_text() for name in ("trainer.py", "training_run.py"))
    stages = re.findall(r'\.stage\("([a-z_]+)"', source)
    assert stages and {f"time/{name}" for name in stages} <= set(METRICS)


def test_update_metrics_are_documented() -> None:
    ones, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    policy = token_loss(
        logprob=-ones, old_logprob=-ones, advantages=ones, weights=ones, mask=mask, clip_low=0.2, clip_high=0.2
    )
    value = ppo_value_loss(values=ones, old_values=ones, returns=ones, weights=ones, mask=mask, value_clip=0.2)
    for role, sums in (("actor", policy.metrics), ("critic", value.metrics)):
        numbers = {name: float(value) for name, value in sums.items()}
        update = Update(applied=True, finite=True, sums=numbers, grad_norm=1.0, learning_rate=1e-6)
        assert {f"{role}/{name}" for name in step_metrics([update])} <= set(METRICS)


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
