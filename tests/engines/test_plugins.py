"""Tests of custom engines: errors before anything is loaded, and the line of user code in failures."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megappo.cli import main
from megappo.config import ConfigError, derive_run, load_config
from megappo.config.sections.engine import IN_PROCESS, EngineCapabilities
from megappo.doctor.software import generation_finding
from megappo.engines.protocol import Engine
from megappo.engines.registry import find_engine, make_engine
from megappo.plugins import failure_text, load_function
from megappo.rewards.rules import number
from megappo.runtime.watch.interrupts import NeverStop
from tests.support.places import QUICKSTART

ENGINES_OF_MINE = """
from megappo.api import EngineCapabilities
from megappo.engines.base import BatchEngine, EngineBase
from megappo.engines.protocol import EngineUsage

class Whole(BatchEngine):
    def __init__(self, *, config, folder, stop_token_ids, runtime, stop): super().__init__(stop)
    def generate(self, requests, params): return iter(())
    def update_weights(self, named_tensors, version): pass
class Ahead(Whole):
    capabilities = EngineCapabilities(concurrent=True, routing=True)
class Described(Whole):
    @property
    def capabilities(self): return EngineCapabilities(concurrent=True)
class Plain:
    def __init__(self, **given):
        self.on_tokens = lambda: None
        self.capabilities, self.version, self.usage, self.replicas = EngineCapabilities(), 0, EngineUsage(), ()
    def submit(self, requests, params): pass
    def poll(self, wait_seconds, *, weights_changed=False): pass
    def pause(self, mode): pass
    def update_weights(self, named_tensors, version): pass
    def sleep(self): pass
    def close(self): pass
class Half:
    def __init__(self, **given): pass
    def submit(self, requests, params): pass
    def poll(self, wait_seconds, *, weights_changed=False): pass
    def pause(self, mode): pass
class Based(EngineBase):
    def __init__(self, **given): pass
    def submit(self, requests, params): pass
    def poll(self, wait_seconds, *, weights_changed=False): pass
class Silent(Plain):
    def __init__(self, **given): pass
def made(*, size=1, **given): return Whole(**given)
def silent(**given): return Silent()
class Narrow(Whole):
    def __init__(self, *, folder): pass
class Served(Whole):
    capabilities = EngineCapabilities(separate_processes=True)
class Wrong(Whole):
    capabilities = {"concurrent": True}
"""


@pytest.fixture(autouse=True)
def engines_of_mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engines_of_mine.py").write_text(ENGINES_OF_MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "engines_of_mine", raising=False)


def settings(engine: str, *overrides: str) -> Any:
    return load_config(str(QUICKSTART), [f"rollout.engine={engine}", *overrides]).rollout


def make(name: str, *overrides: str) -> Engine:
    config = load_config(str(QUICKSTART), [f"rollout.engine=engines_of_mine:{name}", *overrides])
    unused: Any = None
    return make_engine(find_engine(config.rollout), config, Path(), (1,), unused, NeverStop())


@pytest.mark.parametrize("name", ["Whole", "Ahead", "Described", "Plain", "made"])
def test_classes_and_functions_can_be_engines(name: str) -> None:
    assert find_engine(settings(f"engines_of_mine:{name}")).__name__ == name  # type: ignore[attr-defined]
    assert make(name).version == 0


@pytest.mark.parametrize("name", ["Ahead", "Described"])
@pytest.mark.parametrize("overrides", [(), ("rollout.environment={name: guess}",)])
@pytest.mark.parametrize("ahead", [1, 2])
def test_concurrent_engine_can_generate_ahead(name: str, ahead: int, overrides: tuple[str, ...]) -> None:
    assert make(name, f"rollout.ahead={ahead}", *overrides).capabilities.concurrent


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("silent", (), "has no on_tokens, capabilities, version, usage, replicas; extend megappo.engines.base.Engine"),
        ("Silent", (), "has no on_tokens, capabilities, version, usage, replicas; extend megappo.engines.base.Engine"),
        ("made", ("rollout.ahead=1",), "rollout.ahead is 1, but .* has no capability `concurrent` to generate during"),
    ],
)
def test_unusable_instances_are_rejected(name: str, overrides: tuple[str, ...], sentence: str) -> None:
    """Only the engine itself shows attributes and the methods of a function's engine."""
    assert find_engine(settings(f"engines_of_mine:{name}", *overrides))
    with pytest.raises(ValueError, match=f"engines_of_mine:{name}") as caught:
        make(name, *overrides)
    assert re.search(sentence, str(caught.value))


@pytest.mark.parametrize(
    ("engine", "overrides", "sentence"),
    [
        ("engines_of_mine:Whol", (), "did you mean 'engines_of_mine:Whole'"),
        ("nobodys:Engine", (), "rollout.engine 'nobodys:Engine': module 'nobodys' cannot be imported"),
        (
            "engines_of_mine:Half",
            (),
            "has no update_weights, sleep, close; extend megappo.engines.base.EngineBase, or implement the members of",
        ),
        ("engines_of_mine:Based", (), "has no pause, update_weights; extend megappo.engines.base.EngineBase, or"),
        ("engines_of_mine:Narrow", (), r"cannot be called with \(config=, folder=, .*; change its parameters or"),
        ("engines_of_mine:Whole", ("rollout.engine_options={size: 3}",), "unexpected keyword argument 'size'"),
        *(
            (
                "engines_of_mine:Whole",
                (f"rollout.ahead={ahead}", *environment),
                f"rollout.ahead is {ahead}, but .* has no capability `concurrent` to generate during the update; "
                "implement it, or set rollout.ahead to 0",
            )
            for ahead in (1, 2)
            for environment in ((), ("rollout.environment={name: guess}",))
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
    assert "rollout.engine 'engines_of_mine:Half' has no update_weights, sleep, close" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_doctor_checks_custom_engines() -> None:
    whole, half = (load_config(str(QUICKSTART), [f"rollout.engine=engines_of_mine:{n}"]) for n in ("Whole", "Half"))
    assert generation_finding(whole).state == "fine"
    finding = generation_finding(half)
    remedy = "extend megappo.engines.base.EngineBase, or implement the members of megappo.engines.protocol.Engine"
    assert (finding.state, finding.remedy) == ("broken", remedy)


def test_unknown_engine_is_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        settings("slang")
    known = ", ".join((*IN_PROCESS, "path/to/file.py:name"))
    assert re.fullmatch(
        f"rollout.engine: 'slang' is none of {known} or package.module:name; choose one of them, or set "
        "rollout.servers to generate with servers",
        str(caught.value),
    )


def test_engine_and_servers_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["rollout.engine=engines_of_mine:Whole", "rollout.servers={tensor_parallel: 1}"]
    assert main(["plan", str(QUICKSTART), "--machine", "cpu", *overrides]) == 2
    message = "rollout: engine 'engines_of_mine:Whole' and servers are both given; remove servers, or remove engine"
    assert message in capsys.readouterr().err


def problems_of(*overrides: str) -> str:
    """Return the problems of a configuration with these overrides, on one rank."""
    config = load_config(str(QUICKSTART), ["actor.layout={}", "critic.layout={}", "runtime.device=cpu", *overrides])
    try:
        derive_run(config, 1)
    except ConfigError as error:
        return "\n".join(error.problems)
    return ""


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("rollout.engine=engines_of_mine:Whole",), ""),
        (("rollout.servers.kind=engines_of_mine:Served",), ""),
        (
            ("rollout.servers.kind=engines_of_mine:Whole",),
            "rollout.servers.kind 'engines_of_mine:Whole' does not run in separate processes; set rollout.engine",
        ),
        (
            ("rollout.engine=engines_of_mine:Served",),
            "rollout.engine 'engines_of_mine:Served' runs in separate processes; set rollout.servers.kind instead",
        ),
        (
            ("rollout.engine=engines_of_mine:Wrong",),
            "rollout.engine 'engines_of_mine:Wrong' has capabilities of type dict, must be",
        ),
        (("rollout.engine=engines_of_mine:Ahead", "rollout.ahead=1", "algorithm.old_logprob=corrected"), ""),
        (
            ("rollout.engine=engines_of_mine:Whole", "rollout.ahead=1"),
            "rollout.ahead is 1, but the engine 'engines_of_mine:Whole' does not generate while the trainer computes; "
            "set it to 0, or set `concurrent` in its capabilities",
        ),
        (
            ("rollout.servers={kind: 'engines_of_mine:Served', pause: retract}",),
            "rollout.servers.pause is retract, but the engine 'engines_of_mine:Served' does not keep requests during "
            "a weight sync; set pause to abort, or set `keeps_requests` in its capabilities",
        ),
        (("rollout.servers={kind: 'engines_of_mine:Served', nodes: 2}",), "nodes 2 does not divide tensor_parallel 1"),
        # the model and the options of a custom engine are not checked
        (("rollout.servers={kind: 'engines_of_mine:Served', tensor_parallel: 3, arguments: {port: 1}}",), ""),
        (("rollout.servers={kind: nobodys:Engine}",), "module 'nobodys' cannot be imported"),
    ],
)
def test_settings_fit_the_capabilities_of_an_engine(overrides: tuple[str, ...], problem: str) -> None:
    assert problem in problems_of(*overrides) and bool(problem) == bool(problems_of(*overrides))


def test_capabilities_are_read_from_the_class() -> None:
    assert settings("engines_of_mine:Whole").capabilities == EngineCapabilities()
    assert settings("engines_of_mine:made").capabilities == EngineCapabilities()
    assert settings("engines_of_mine:Ahead").capabilities == EngineCapabilities(concurrent=True, routing=True)
    assert settings("engines_of_mine:Ahead", "rollout.load_from=x").capabilities == EngineCapabilities()


def test_servers_of_a_custom_engine_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan has the memory of servers, and a custom engine in the trainers is planned as the embedded one."""
    servers = "rollout.servers={kind: 'engines_of_mine:Served', max_total_tokens: 8}"  # less than the longest sequence
    assert main(["plan", str(QUICKSTART), "--machine", "cpu", servers]) == 0
    output = capsys.readouterr().out
    assert "with the embedded engine, the rollout would take" in output and "sglang" not in output
    find_engine(load_config(str(QUICKSTART), ["rollout.servers.kind=engines_of_mine:Served"]).rollout)


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
