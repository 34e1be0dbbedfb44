"""The one way from a configuration to a run that may start."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megappo.config import Config, ConfigError, Derived, check_run, load_config
from megappo.engines import registry
from megappo.plan.deadlines import WATCHED_COLLECTIVE_SECONDS
from megappo.ppo import parts, run
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
    """The first of two, on which the quickstart's layouts stand."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)


def test_a_run_has_its_engine_and_deadlines_beside_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings stay those that the user gave, but for the engine of this device."""
    checked: list[int] = []

    def check(config: Config, world_size: int) -> Derived:
        checked.append(world_size)
        return check_run(config, world_size)

    monkeypatch.setattr(resolved, "check_run", check)
    given = load_config(QUICKSTART, ["rollout.engine=transformers", "runtime.device=cpu"])
    found = resolve_run("train", given)
    assert found.config == given and checked == [2], "no rule is tried twice"
    assert found.engine is registry.find_engine(given.rollout)
    assert found.deadlines.collective_seconds == WATCHED_COLLECTIVE_SECONDS != given.runtime.collective_timeout_seconds
    assert found.derived.steps == given.run.steps and found.inputs is None
    assert "plan" in dict(found.rows)
    unset = load_config(QUICKSTART, ["rollout.engine=null", "runtime.device=cpu"])
    assert unset.rollout.engine is None
    assert resolve_run("train", unset).config.rollout.engine == "transformers"


def test_epochs_are_counted_on_inputs_that_the_run_keeps(tmp_path: Path) -> None:
    length = ["run.steps=null", "run.epochs=2", "runtime.device=cpu", f"run.directory={tmp_path}"]
    found = resolve_run("train", load_config(QUICKSTART, length))
    assert found.inputs is not None and found.config.data.template_time is not None
    prompts = len(found.inputs.training)
    assert found.derived.prompts == prompts
    assert found.derived.steps == -(-2 * prompts // found.config.rollout.prompts_per_step)


def test_mistakes_are_refused_before_the_engine_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_engine", lambda _: pytest.fail("the engine was looked for"))
    with pytest.raises(ConfigError, match="actor.minibatch_sequences"):
        resolve_run("train", load_config(QUICKSTART, ["actor.minibatch_sequences=7"]))


def test_an_outline_is_of_the_ranks_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(QUICKSTART)
    assert outline_run(config, str(QUICKSTART)).derived.world_size == 2, "as many as were started"
    assert outline_run(config, str(QUICKSTART), world_size=4).derived.world_size == 4
    monkeypatch.setenv("WORLD_SIZE", "1")
    pairs = load_config(QUICKSTART, ["actor.layout.tensor_parallel=2"])
    assert outline_run(pairs, str(QUICKSTART)).derived.world_size == 2, "the fewest on which the layouts stand"
    assert outline_run(load_config(QUICKSTART), str(QUICKSTART), on_cuda=True).config.rollout.engine is not None


def test_a_users_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what reads the prompts, whose templates show its tools; its episodes are played by the same object."""
    (tmp_path / "counted_environment.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["rollout.environment={name: 'counted_environment:Counted'}", "reward.function=environment"]
    inputs = read_inputs(load_config(QUICKSTART, words))
    assert sys.modules["counted_environment"].Counted.made == 1
    played: list[Any] = []

    def stop(*given: Any) -> None:
        played.append(given[1])
        raise SystemExit

    monkeypatch.setattr(parts, "make_environment_context", stop)
    monkeypatch.setattr(parts, "check_data", lambda *_: None)
    with pytest.raises(SystemExit):
        config: Any = load_config(QUICKSTART, words)
        parts.assemble(config, SimpleNamespace(), SimpleNamespace(), parts.RunMode(inputs=inputs))  # type: ignore[arg-type]
    assert played == [inputs.environment] and sys.modules["counted_environment"].Counted.made == 1


@pytest.mark.parametrize(("reads_clock", "another"), [(True, True), (True, False), (False, True)])
def test_inputs_of_another_time_are_read_anew(reads_clock: bool, another: bool) -> None:
    """Only where a chat template reads the clock."""
    read = load_config(QUICKSTART, ["data.template_time='2024-07-26 09:30:15'"])
    started = load_config(QUICKSTART, [f"data.template_time='202{5 if another else 4}-07-26 09:30:15'"])
    inputs: Any = SimpleNamespace(reads_clock=reads_clock)
    found = run.inputs_at(SimpleNamespace(config=read, inputs=inputs), started)  # type: ignore[arg-type]
    assert found is (None if reads_clock and another else inputs)
