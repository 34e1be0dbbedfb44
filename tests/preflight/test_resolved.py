"""Tests of the resolution of a configuration into a valid run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megappo.config import Config, ConfigError, Derived, check_run, load_config
from megappo.engines import registry
from megappo.plan.deadlines import WATCHED_COLLECTIVE_SECONDS
from megappo.ppo import run
from megappo.ppo.assembly import components
from megappo.preflight import resolved
from megappo.preflight.inputs import read_inputs
from megappo.preflight.resolved import outline_run, resolve_run
from tests.support.places import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
ENVIRONMENT = """
class Counted:
    made = 0

    def __init__(self):
        Counted.made += 1

    async def run(self, session):
        await session.generate()
        return 1.0
"""


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate rank 0 of two ranks, as required by the layouts of the quickstart."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)


def test_resolved_run_has_engine_and_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings stay as the user wrote them, except for the default engine of the device."""
    checked: list[int] = []

    def check(config: Config, world_size: int) -> Derived:
        checked.append(world_size)
        return check_run(config, world_size)

    monkeypatch.setattr(resolved, "check_run", check)
    user_config = load_config(QUICKSTART, ["rollout.engine=transformers", "runtime.device=cpu"])
    resolved_run = resolve_run("train", user_config)
    assert resolved_run.config == user_config and checked == [2], "the rules must be checked exactly once"
    assert resolved_run.engine is registry.find_engine(user_config.rollout)
    assert (
        resolved_run.deadlines.collective_seconds
        == WATCHED_COLLECTIVE_SECONDS
        != user_config.runtime.collective_timeout_seconds
    )
    assert resolved_run.derived.steps == user_config.run.steps and resolved_run.inputs is None
    assert "plan" in dict(resolved_run.rows)
    unset = load_config(QUICKSTART, ["rollout.engine=null", "runtime.device=cpu"])
    assert unset.rollout.engine is None
    assert resolve_run("train", unset).config.rollout.engine == "transformers"


def test_epochs_use_the_inputs_of_the_run(tmp_path: Path) -> None:
    length = ["run.steps=null", "run.epochs=2", "runtime.device=cpu", f"run.directory={tmp_path}"]
    resolved_run = resolve_run("train", load_config(QUICKSTART, length))
    assert resolved_run.inputs is not None and resolved_run.config.data.template_time is not None
    prompts = len(resolved_run.inputs.training)
    assert resolved_run.derived.prompts == prompts
    assert resolved_run.derived.steps == -(-2 * prompts // resolved_run.config.rollout.prompts_per_step)


def test_settings_are_checked_before_the_engine_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_engine", lambda _: pytest.fail("the engine search must not start"))
    with pytest.raises(ConfigError, match="actor.minibatch_sequences"):
        resolve_run("train", load_config(QUICKSTART, ["actor.minibatch_sequences=7"]))


def test_outline_uses_the_requested_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(QUICKSTART)
    assert outline_run(config, str(QUICKSTART)).derived.world_size == 2, "the default is the number of started ranks"
    assert outline_run(config, str(QUICKSTART), world_size=4).derived.world_size == 4
    monkeypatch.setenv("WORLD_SIZE", "1")
    pairs = load_config(QUICKSTART, ["actor.layout.tensor_parallel=2"])
    assert outline_run(pairs, str(QUICKSTART)).derived.world_size == 2, "the minimum number of ranks for the layouts"
    assert outline_run(load_config(QUICKSTART), str(QUICKSTART), on_cuda=True).config.rollout.engine_name is not None


def test_custom_environment_is_created_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of prompts creates the environment, because chat templates show its tools. The same object plays the
    episodes."""
    (tmp_path / "counted_environment.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = ["rollout.environment={name: 'counted_environment:Counted'}", "reward.function=environment"]
    inputs = read_inputs(load_config(QUICKSTART, overrides))
    assert sys.modules["counted_environment"].Counted.made == 1
    played: list[Any] = []

    def stop(*arguments: Any) -> None:
        played.append(arguments[1])
        raise SystemExit

    monkeypatch.setattr(components, "make_environment_context", stop)
    monkeypatch.setattr(components, "check_data", lambda *_: None)
    with pytest.raises(SystemExit):
        config: Any = load_config(QUICKSTART, overrides)
        components.assemble(config, SimpleNamespace(), SimpleNamespace(), components.RunMode(inputs=inputs))  # type: ignore[arg-type]
    assert played == [inputs.environment] and sys.modules["counted_environment"].Counted.made == 1


@pytest.mark.parametrize(("reads_clock", "another"), [(True, True), (True, False), (False, True)])
def test_inputs_are_reread_after_time_change(reads_clock: bool, another: bool) -> None:
    """Inputs are read again only if a chat template uses the clock."""
    read = load_config(QUICKSTART, ["data.template_time='2024-07-26 09:30:15'"])
    started = load_config(QUICKSTART, [f"data.template_time='202{5 if another else 4}-07-26 09:30:15'"])
    inputs: Any = SimpleNamespace(reads_clock=reads_clock)
    inputs_of_run = run.inputs_at(SimpleNamespace(config=read, inputs=inputs), started)  # type: ignore[arg-type]
    assert inputs_of_run is (None if reads_clock and another else inputs)
