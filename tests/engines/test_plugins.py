"""Tests of custom engines: errors before anything is loaded, and the line of user code in failures."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megappo.cli import main
from megappo.config import ConfigError, load_config
from megappo.config.engine import ENGINES
from megappo.doctor.software import generation_finding
from megappo.engines.registry import find_engine
from megappo.plugins import failure_text, load_function
from megappo.rewards.rules import number
from tests.support.places import QUICKSTART

ENGINES_OF_MINE = """
class Whole:
    def __init__(self, *, config, folder, stop_token_ids, runtime, stop): pass
    def generate(self, requests, params, done=None): pass
    def update_weights(self, named_tensors, version): pass
    def close(self): pass
class Ahead(Whole):
    def submit(self, requests, params): pass
    def collect(self, pending, *, weights_changed=False): pass
class Half:
    def __init__(self, **given): pass
    def generate(self, requests, params, done=None): pass
def made(*, size=1, **given): return Whole(**given)
class Narrow(Whole):
    def __init__(self, *, folder): pass
"""


@pytest.fixture(autouse=True)
def engines_of_mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engines_of_mine.py").write_text(ENGINES_OF_MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "engines_of_mine", raising=False)


def settings(engine: str, *overrides: str) -> Any:
    return load_config(str(QUICKSTART), [f"rollout.engine={engine}", *overrides]).rollout


@pytest.mark.parametrize("name", ["Whole", "Ahead", "made"])
def test_classes_and_functions_can_be_engines(name: str) -> None:
    assert find_engine(settings(f"engines_of_mine:{name}")).__name__ == name  # type: ignore[attr-defined]


def test_engine_with_submit_can_generate_ahead() -> None:
    assert find_engine(settings("engines_of_mine:Ahead", "rollout.ahead=1"))


@pytest.mark.parametrize(
    ("engine", "overrides", "sentence"),
    [
        ("engines_of_mine:Whol", (), "did you mean 'engines_of_mine:Whole'"),
        ("nobodys:Engine", (), "rollout.engine 'nobodys:Engine': module 'nobodys' cannot be imported"),
        (
            "engines_of_mine:Half",
            (),
            "has no update_weights, close; implement the methods of megappo.engines.protocol.Engine",
        ),
        ("engines_of_mine:Narrow", (), r"cannot be called with \(config=, folder=, .*; change its parameters or"),
        ("engines_of_mine:Whole", ("rollout.engine_options={size: 3}",), "unexpected keyword argument 'size'"),
        ("engines_of_mine:Whole", ("rollout.ahead=1",), "rollout.ahead is 1, but .* has no submit and collect"),
        (
            "engines_of_mine:Whole",
            ("rollout.ahead=1", "rollout.environment={name: guess}"),
            "rollout.ahead is 1, but .* has no converse and open_stream and finish_stream",
        ),
        (
            "engines_of_mine:Whole",
            ("rollout.ahead=2", "rollout.environment={name: guess}"),
            "rollout.ahead is 2, but .* has no send and finished and abort and listen",
        ),
        (
            "engines_of_mine:Ahead",
            ("rollout.ahead=2",),
            "rollout.ahead is 2, but .* no send and finished and abort",
        ),
        ("transformers", ("rollout.engine_options={size: 3}",), "unexpected keyword argument 'size'"),
    ],
)
def test_unusable_engines_are_rejected(engine: str, overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        find_engine(settings(engine, *overrides))
    assert "\n" not in str(caught.value)


def test_unusable_engine_ends_run_before_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    overrides = ["rollout.engine=engines_of_mine:Half", f"run.directory={tmp_path / 'run'}"]
    assert main(["train", str(QUICKSTART), "actor.layout={}", "critic.layout={}", *overrides]) == 2
    assert "rollout.engine 'engines_of_mine:Half' has no update_weights" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_doctor_checks_custom_engines() -> None:
    whole, half = (load_config(str(QUICKSTART), [f"rollout.engine=engines_of_mine:{n}"]) for n in ("Whole", "Half"))
    assert generation_finding(whole).state == "fine"
    finding = generation_finding(half)
    assert (finding.state, finding.remedy) == ("broken", "implement the methods of megappo.engines.protocol.Engine")


def test_unknown_engine_is_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        settings("slang")
    known = ", ".join((*ENGINES, "path/to/file.py:name"))
    assert re.fullmatch(
        f"rollout.engine: 'slang' is none of {known} or package.module:name; did you mean 'sglang'\\?",
        str(caught.value),
    )


def test_server_settings_require_the_sglang_engine(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["rollout.engine=engines_of_mine:Whole", "rollout.sglang={tensor_parallel: 1}"]
    assert main(["plan", str(QUICKSTART), "--machine", "cpu", *overrides]) == 2
    assert "rollout.sglang is given but rollout.engine is 'engines_of_mine:Whole'; set" in capsys.readouterr().err


def raised(function: Any, *arguments: Any) -> BaseException:
    try:
        function(*arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a user's function raises
        return error
    raise AssertionError("the function raised no error")


THEIRS = """
import json, decimal
def directly(): raise KeyError("price")
def deeper(): return directly()
def in_a_library(): return json.loads("{")
def in_another(): return decimal.Decimal("x")
def leaves(): raise SystemExit(3)
def long(): raise ValueError("x" * 9000)
"""


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("directly", 3, "KeyError: 'price'"),
        ("deeper", 3, "KeyError: 'price'"),
        ("in_a_library", 5, "JSONDecodeError: Expecting property name"),
        ("in_another", 6, "InvalidOperation: "),
        ("leaves", 7, "SystemExit: 3"),
        ("long", 8, "ValueError: xxx"),
    ],
)
def test_failure_message_has_line_of_user_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, line: int, expected: str
) -> None:
    (tmp_path / "theirs.py").write_text(THEIRS)
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    message = failure_text(raised(load_function(f"theirs:{name}", "a setting")))
    assert (
        message.startswith(expected) and message.endswith(f" ({tmp_path / 'theirs.py'}:{line})") and len(message) < 400
    )


def test_megappo_errors_have_no_user_line() -> None:
    with pytest.raises(ValueError, match="needs an answer") as caught:
        number(prompt="", response="", answer=None, metadata={})
    caught.value.__traceback__ = caught.tb.tb_next  # without this test's frame
    assert failure_text(caught.value).endswith("set data.train.answer_key")
