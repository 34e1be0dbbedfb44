"""Tests of the rules for prompts in flight and for records of arrivals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megappo.config import load_config
from megappo.config.role_models import load_architecture
from megappo.config.rules.arrivals import arrivals_rules
from megappo.config.rules.in_flight import in_flight_rules, longest_lag
from tests.support.places import BASE, TINY

GUESSING = "rollout.environment={name: guess}"
TWO = ("rollout.ahead=2", "rollout.max_lag=2")
ELSEWHERE = "placement: disaggregated, urls: ['http://127.0.0.1:1']"
REPLAY = "rollout.replay_arrivals=RECORD"


def servers(settings: str) -> tuple[str, ...]:
    return ("rollout.servers.kind=sglang", f"rollout.servers={{{settings}}}")


def test_record_with_a_gap_is_rejected(tmp_path: Path) -> None:
    """A run that skipped the recording of a step leaves such a record."""
    for step in (2, 3, 5):
        (tmp_path / f"step-{step:06d}").mkdir()
    lines = [json.dumps({"step": step, "sizes": [8, 2]}) + "\n" for step in (2, 3, 5)]
    (tmp_path / "steps.jsonl").write_text("".join(lines))
    problems = {}
    for steps in (5, 3):
        overrides = [f"model.path={TINY}", *TWO, f"rollout.replay_arrivals={tmp_path}", f"run.steps={steps}"]
        problems[steps] = list(arrivals_rules(load_config(str(BASE), overrides)))
    assert problems[3] == [] and len(problems[5]) == 1
    assert "lacks step 4, which was trained without rollout.record_arrivals; set run.steps to 3" in problems[5][0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rollout.ahead=4", "rollout.max_lag=2"), "above rollout.max_lag 2 so that responses would be too old"),
        (("rollout.ahead=1", "rollout.max_lag=2"), "no response has a lag above 1; remove max_lag, or set ahead to 2"),
        ((*TWO, "rollout.when_stopped=keep"), "keeps all finished responses; remove it"),
        ((*TWO, *servers("pause: retract")), "set probe to false and verify to true to check a sync by checksums"),
        ((*TWO, *servers("pause: in_place, probe: false, verify: false")), "set probe to false and verify to true"),
        (
            servers("pause: in_place, probe: false"),
            "ahead 0 no request is running when weights change; set pause to abort",
        ),
        ((*TWO, *servers("pause: retract, probe: false, " + ELSEWHERE)), "would stay paused if the run ended during a"),
        (("rollout.record_arrivals=true",), "rollout.record_arrivals is set, but with rollout.ahead 0 each step waits"),
        (("rollout.replay_arrivals=RECORD", "rollout.ahead=1"), "remove replay_arrivals, or set ahead to 2 or more"),
        ((*TWO, "rollout.replay_arrivals=."), "steps.jsonl cannot be read"),
        ((*TWO, REPLAY, "run.steps=2", "rollout.record_arrivals=true"), "remove one of them"),
        ((*TWO, REPLAY, "run.steps=2", "rollout.samples_per_prompt=3"), "has steps of [8, 2] prompts and samples per"),
        ((*TWO, REPLAY), "ends with step 2, before run.steps 10; set run.steps to at most the last recorded"),
        ((*TWO, "rollout.replay_arrivals=RECORD/empty"), "empty' has no step; use the record of a run that completed"),
        ((*TWO, REPLAY, "run.steps=1"), "has no files for step 2; copy the whole folder"),
        ((*TWO, GUESSING, "rollout.record_arrivals=true"), "but episodes cannot be recorded; remove record_arrivals"),
        ((*TWO, GUESSING, *servers("pause: retract, probe: false")), "turns of episodes are aborted when weights"),
        (TWO, "has no routing to replay; set algorithm.router_replay to false"),
    ],
)
def test_conflicting_settings_are_rejected(overrides: tuple[str, ...], message: str, tmp_path: Path) -> None:
    """The last case needs a model with experts and replayed routing, and is valid otherwise."""
    (tmp_path / "step-000001").mkdir()
    lines = [json.dumps({"step": step, "sizes": [8, 2]}) for step in (1, 2, 3, 2)]  # the run was killed in step 3
    (tmp_path / "steps.jsonl").write_text("\n".join([*lines, '{"step": 3,']))
    if "steps=1" not in str(overrides):
        (tmp_path / "step-000002").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "steps.jsonl").touch()
    overrides = tuple(word.replace("RECORD", str(tmp_path)) for word in overrides)
    config = load_config(str(BASE), [f"model.path={TINY}", *overrides])
    shape = load_architecture(TINY, config.model)
    (problem,) = in_flight_rules(config, replace(shape, experts=8 * (overrides == TWO)))
    assert message in problem
    alone = load_config(str(BASE), [f"model.path={TINY}", *TWO, "algorithm.router_replay=false"])
    assert not list(in_flight_rules(alone, replace(shape, experts=8)))
    assert longest_lag(load_config(str(BASE), [f"model.path={TINY}", "rollout.ahead=1"])) == 1
    both = [f"model.path={TINY}", *TWO, "rollout.dynamic_sampling={}", "data.curriculum={right_above: 0.9}"]
    assert not list(in_flight_rules(load_config(str(BASE), both), replace(shape, experts=0)))
    grpo = load_config(str(BASE), [f"model.path={TINY}", "critic=null", "algorithm.estimator=grpo", "rollout.ahead=3"])
    assert longest_lag(grpo) == 3 and not list(in_flight_rules(grpo, shape))
