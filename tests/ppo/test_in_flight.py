"""Tests of prompts in flight: selection of groups, interrupted answers, resumption and replay."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megappo.config import load_config
from megappo.config.model_files import load_architecture
from megappo.config.rules.arrivals import arrivals_rules
from megappo.config.rules.in_flight import in_flight_rules, longest_lag
from megappo.data.curriculum import Curriculum
from megappo.data.cursor import Cursor
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.engines.stopping import StopTexts, stopped
from megappo.engines.stretches import continued, ended, joined, token_versions
from megappo.ppo.arrivals import ReplayedArrivals
from megappo.ppo.generation import Kept
from megappo.ppo.in_flight import InFlight, responses_of
from megappo.ppo.in_flight_state import KEY, State, read_state, written_state
from megappo.ppo.measures import rollout_metrics
from megappo.ppo.tickets import Group, choose
from megappo.runtime.interrupts import NeverStop
from megappo.types import Prompt, Rollouts
from tests.support.episodes import TOKENIZER
from tests.support.places import BASE, TINY

PROMPTS = [Prompt(i, (2, 3 + i % 10), f"{i}", None, {}) for i in range(30)]
STOP = 1
GUESSING = "rollout.environment={name: guess}"
TWO = ("rollout.ahead=2", "rollout.max_lag=2")
ELSEWHERE = "placement: disaggregated, urls: ['http://127.0.0.1:1']"
REPLAY = "rollout.replay_arrivals=RECORD"

pytestmark = pytest.mark.usefixtures("world_of_one")


def servers(settings: str) -> tuple[str, ...]:
    return "rollout.engine=sglang", f"rollout.sglang={{{settings}}}"


def groups(*versions: int, finished: Sequence[int]) -> list[Group]:
    return [Group(i, i, version, i in finished) for i, version in enumerate(versions)]


def tickets(chosen: list[Group] | None) -> list[int] | None:
    return None if chosen is None else [group.ticket for group in chosen]


def test_step_takes_oldest_groups_first() -> None:
    some = groups(4, 4, 4, 5, 5, 5, finished=(1, 3, 4, 5))
    assert tickets(choose(some, size=2, newest=5, max_lag=3)) == [1, 3]
    assert choose(some, size=5, newest=5, max_lag=3) is None


def test_step_waits_for_groups_near_the_age_limit() -> None:
    """The limit allows prompts 0 to 2 in this step and the next. Each step trains two prompts, so this step must take
    at least one of the three. Five prompts of that age would require three in this step, which is too many."""
    some = groups(4, 4, 4, 5, 5, 5, finished=(3, 4, 5))
    assert choose(some, size=2, newest=5, max_lag=2) is None
    some[1].finished = True
    assert tickets(choose(some, size=2, newest=5, max_lag=2)) == [1, 3]
    # Further rounds belong to the same step. The two old groups still fit, because each later step takes two.
    assert tickets(choose([some[0], *some[2:]], size=1, newest=5, max_lag=2, of_step=2)) == [3]
    assert choose([some[0], *some[2:]], size=1, newest=5, max_lag=2) is None
    # The last possible step takes all of the old groups.
    assert choose(some, size=3, newest=6, max_lag=2) is None


@given(
    ahead=st.integers(2, 5), more=st.integers(0, 2), size=st.integers(1, 4), seed=st.integers(0, 999),
    oldest_last=st.booleans(),
)  # fmt: skip
def test_no_group_exceeds_the_age_limit(ahead: int, more: int, size: int, seed: int, oldest_last: bool) -> None:
    """The oldest groups may finish last. Without waiting, these groups would become too old."""
    drawn, some, sent = random.Random(seed), list[Group](), 0
    for newest in range(1, 12):
        while True:
            while len(some) < ahead * size:
                some.append(Group(sent, sent, newest))
                sent += 1
            chosen = choose(some, size=size, newest=newest, max_lag=ahead + more)
            if chosen is not None:
                break
            unfinished = [group for group in some if not group.finished]
            (unfinished[-1] if oldest_last else drawn.choice(unfinished)).finished = True
        assert len(chosen) == size and all(group.finished for group in chosen)
        some = [group for group in some if group not in chosen]
        assert all(newest - group.version <= ahead + more for group in chosen)
        assert all(newest + 1 - group.version <= ahead + more for group in some)  # all stay usable in the next step


def test_interrupted_answer_continues_from_its_tokens() -> None:
    request = GenerateRequest((7, 8), seed=5, prompt_id=0)
    begun = Completion((3, 4), (-0.1, -0.2), False, 2, broken_off=True)
    rest = continued(request, begun, 5)
    assert (rest.token_ids, rest.max_new_tokens) == ((7, 8, 3, 4), 3)
    assert len({5, rest.seed, continued(request, replace(begun, token_ids=(3,)), 5).seed}) == 3
    assert continued(request, None, 5) is request
    more = joined(begun, Completion((5,), (-0.3,), False, 3, broken_off=True))
    assert more.broken_off and more.weight_version == 2 and more.stretches == ((2, 2), (3, 1))
    again = joined(more, Completion((6,), (-0.4,), False, 3, broken_off=True))  # a server restarted in between
    whole = joined(again, Completion((9, STOP), (-0.5, -0.6), False, 4))
    assert whole.token_ids == (3, 4, 5, 6, 9, STOP) and whole.logprobs == (-0.1, -0.2, -0.3, -0.4, -0.5, -0.6)
    assert not whole.broken_off and whole.weight_version == 2
    assert token_versions(whole) == [2, 2, 3, 3, 4, 4]
    assert joined(begun, Completion((), (), False, 9, broken_off=True)) is begun
    assert joined(None, rest_of := Completion((1,), (-1.0,), False, 9)) is rest_of


def test_stop_text_can_span_an_interruption() -> None:
    """Tokens after the stop text are dropped, even if other weights generated them. The minimum length counts from the
    start of the answer."""
    tokens = tuple(TOKENIZER("hide.go", add_special_tokens=False)["input_ids"])
    request, params = GenerateRequest((7,), 5, 0), SamplingParams(1.0, 9, (), min_new_tokens=4)
    begun = Completion(tokens[:3], (-0.1, -0.2, -0.3), False, 4, broken_off=True)
    rest = continued(request, begun, 9, request.least_tokens(params))
    assert (rest.least_tokens(params), request.least_tokens(params)) == (1, 4)
    routing = torch.arange(7).view(7, 1, 1)  # for the prompt and all tokens except the last
    whole = joined(begun, Completion(tokens[3:], (-0.4, -0.5, -0.6, -0.7), True, 5, routing))
    params = replace(params, stop_texts=StopTexts(("de",), TOKENIZER))
    for answer in (whole, replace(whole, broken_off=True)):
        stopped_answer = stopped(answer, params)
        assert (stopped_answer.token_ids, stopped_answer.logprobs) == (tokens[:4], (-0.1, -0.2, -0.3, -0.4))
        assert not stopped_answer.truncated and not stopped_answer.broken_off
        assert stopped_answer.stretches == ((4, 3), (5, 1)) and stopped_answer.weight_version == 4
        assert stopped_answer.routing is not None and stopped_answer.routing.flatten().tolist() == [0, 1, 2, 3]
    assert stopped(begun, params) is begun


def test_answer_interrupted_at_its_end_is_complete() -> None:
    at_end = Completion((3, STOP), (-1.0, -1.0), False, 2, broken_off=True)
    assert not ended(at_end, (STOP,), 9).broken_off and not ended(at_end, (STOP,), 9).truncated
    full = Completion((3, 4), (-1.0, -1.0), False, 2, broken_off=True)
    assert ended(full, (STOP,), 2).truncated and not ended(full, (STOP,), 2).broken_off
    assert ended(full, (STOP,), 3) is full


def test_checkpoint_restores_state_exactly() -> None:
    answers = {
        4: Completion((3, 4, 1), (-0.1, -1 / 3, -2.0), False, 2, stretches=((2, 1), (3, 2))),
        9: Completion((3,), (-0.7,), False, 3, broken_off=True),
    }
    state = State([(Group(2, 17, 2, True), 5, 1), (Group(4, 3, 3), 0, 0)], [8, 8], 5, 1, answers)
    assert read_state(written_state(state, (4, 2))) == (state, (4, 2))
    nothing = State([], [], 0, 0, {})
    assert read_state(written_state(nothing, (4, 2))) == (nothing, (4, 2))


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


@dataclass
class StandIn:
    """An engine that generates tokens on demand. Sample n has 1 + n % 3 tokens that identify the sample, and the stop
    token. The log-probability of a token is minus its weight version."""

    version: int = 1
    under_way: dict[int, tuple[GenerateRequest, list[int], list[int]]] = field(default_factory=dict)
    """Each request with its tokens and the version of each token."""
    done: dict[int, Completion] = field(default_factory=dict)
    finishes: list[int] = field(default_factory=list)
    """Numbers of the finished requests, in order."""
    prefixes: dict[int, list[int]] = field(default_factory=dict)
    """Number of earlier tokens of each request, one entry per submission."""
    ticks: int = 1
    """Number of tokens that `finished` generates per request."""
    stuck: frozenset[int] = frozenset()

    def send(self, requests: Mapping[int, GenerateRequest], params: SamplingParams) -> None:
        assert not requests.keys() & (self.under_way.keys() | self.done.keys())
        for number, request in requests.items():
            self.under_way[number] = request, [], []
            self.prefixes.setdefault(number, []).append(len(request.token_ids) - 2)

    def tick(self) -> None:
        for number, (request, tokens, versions) in list(self.under_way.items()):
            if number not in self.stuck:
                previous = len(request.token_ids) - 2
                tokens.append(3 + number % 10 if previous + len(tokens) < 1 + number % 3 else STOP)
                versions.append(self.version)
                if tokens[-1] == STOP:
                    self.done[number] = self._answer(number, broken_off=False)
                    del self.under_way[number]

    def _answer(self, number: int, *, broken_off: bool) -> Completion:
        _, tokens, versions = self.under_way[number]
        logprobs = tuple(-float(version) for version in versions)
        version_counts = tuple((version, versions.count(version)) for version in sorted(set(versions)))
        return Completion(
            tuple(tokens),
            logprobs,
            False,
            min(versions, default=self.version),
            broken_off=broken_off,
            stretches=version_counts if len(version_counts) > 1 else (),
        )

    def finished(self, wait_seconds: float) -> dict[int, Completion]:
        if not self.done:
            for _ in range(self.ticks):
                self.tick()
        done, self.done = self.done, {}
        self.finishes += done
        return done

    def abort(self) -> dict[int, Completion]:
        done, self.done = self.done, {}
        self.finishes += done
        done |= {number: self._answer(number, broken_off=True) for number in self.under_way}
        self.under_way = {}
        return done


@dataclass
class Holding(StandIn):
    """Keeps running requests while weights change."""

    keeps_requests: bool = True
    hold_calls: int = 0

    def hold(self) -> None:
        self.tick()  # generate tokens in the meantime
        self.hold_calls += 1


def parts(engine: Any, *overrides: str, steps: int = 8) -> Any:
    """Return the components of a run: two prompts of two samples per step, three steps ahead."""
    all_overrides = ("rollout.ahead=3", "rollout.max_lag=3", "rollout.prompts_per_step=2", *overrides)
    config = load_config(str(BASE), [f"model.path={TINY}", *all_overrides])
    cursor = Cursor(len(PROMPTS), 3, False, fingerprint="data", most_resting=0.9)
    settings = config.data.curriculum
    return SimpleNamespace(
        config=config,
        engine=engine,
        episodes=None,
        cursor=cursor,
        curriculum=None if settings is None else Curriculum(settings, cursor, 0),
        train_prompts=PROMPTS,
        runtime=SimpleNamespace(rank=0, world_size=1, is_main=True, device=torch.device("cpu")),
        stop=NeverStop(),
        tokenizer=AutoTokenizer.from_pretrained(TINY),
        vocabulary=16,
        answerer="the engine",
        derived=SimpleNamespace(steps=steps),
        sampling=lambda most, trained_on: SamplingParams(
            config.rollout.temperature, most, (STOP,), min_new_tokens=config.rollout.min_response_tokens
        ),
    )


def in_flight(engine: Any, *overrides: str, steps: int = 8) -> InFlight:
    return InFlight(parts(engine, *overrides, steps=steps))


def sync(responses: InFlight, engine: StandIn) -> None:
    responses.pause()
    engine.version += 1
    responses.go_on()


def trained(rollouts: Rollouts) -> list[int]:
    """Return the prompt index of each sample."""
    return [prompt.index for prompt in rollouts.prompts]


def test_steps_take_groups_while_weights_change() -> None:
    engine = StandIn(ticks=2)
    responses, seen = in_flight(engine), list[int]()
    for step in range(1, 9):
        rollouts = responses.of_step(step, weights_changed=False)
        assert trained(rollouts)[::2] == trained(rollouts)[1::2]  # groups are complete
        assert rollouts.sample_ids_B.tolist() == [0, 1, 2, 3] and rollouts.group_ids_B.tolist() == [0, 0, 1, 1]
        seen += trained(rollouts)[::2]
        # The engine encodes the version of each token in the log-probability.
        mask_BR, versions_BR = rollouts.response_mask_BR, rollouts.token_versions_BR
        assert versions_BR is not None
        assert torch.equal(versions_BR[mask_BR], -rollouts.engine_logprob_BR[mask_BR].long())
        assert rollouts.weight_versions_B.tolist() == versions_BR.masked_fill(~mask_BR, 99).amin(-1).tolist()
        for sequence, prompt in zip(rollouts.sequences, rollouts.prompts, strict=True):
            assert tuple(sequence[:2].tolist()) == prompt.token_ids and sequence[-1] == STOP
            assert len(set(sequence[2:-1].tolist())) == 1
        numbers = rollout_metrics(rollouts, cast(Any, SimpleNamespace(device=torch.device("cpu"))), engine.version)
        lags = engine.version - versions_BR[mask_BR]
        assert numbers["rollout/lag"] == pytest.approx(float(lags.double().mean()))
        assert numbers["rollout/lag_max"] == lags.max() <= 3
        mixed = [len(set(v[m].tolist())) > 1 for v, m in zip(versions_BR, mask_BR, strict=True)]
        assert numbers["rollout/several_versions"] == sum(mixed) / 4
        assert len(engine.under_way) <= 12
        responses.forget(step)
        sync(responses, engine)
    assert sorted(seen) == list(range(16)) and sorted(engine.finishes) == list(range(32))  # each sample once
    assert max(len(prefixes) for prefixes in engine.prefixes.values()) > 1  # some requests were resumed


def test_engine_may_hold_running_requests() -> None:
    """Requests keep running while weights change. A stop of the run aborts the requests."""
    engine = Holding(ticks=2)
    responses, mixed = in_flight(engine), 0
    for step in range(1, 9):
        rollouts = responses.of_step(step, weights_changed=False)
        mask_BR, versions_BR = rollouts.response_mask_BR, rollouts.token_versions_BR
        assert versions_BR is not None
        assert torch.equal(versions_BR[mask_BR], -rollouts.engine_logprob_BR[mask_BR].long())
        mixed += sum(len(set(v[m].tolist())) > 1 for v, m in zip(versions_BR, mask_BR, strict=True))
        if step == 4:
            responses.pause(stops=True)
            responses.go_on()
        assert responses.metrics()["rollout/partial"] == 0 or step >= 4
        responses.forget(step)
        if step < 8:
            sync(responses, engine)
    assert engine.hold_calls == 7 and mixed > 0
    again = [prefixes for prefixes in engine.prefixes.values() if len(prefixes) > 1]
    assert again and all(len(prefixes) == 2 for prefixes in again)  # only because of the stop
    assert sorted(engine.finishes) == list(range(32))


def test_stale_samples_are_dropped_and_their_prompts_resent() -> None:
    """A resumed run may have a lower limit of the lag."""
    engine = StandIn()
    first = in_flight(engine)
    before = trained(first.of_step(1, weights_changed=False))
    engine.stuck = frozenset(range(100))
    first.forget(1)
    sync(first, engine)
    sync(first, engine)  # now the requests lag by three versions
    state = first.state_dict(2)
    engine = StandIn(version=4)
    second = in_flight(engine, "rollout.ahead=2", "rollout.max_lag=2")
    second.load_state_dict([state])
    metrics = second.metrics()
    assert metrics["rollout/dropped"] == 6 and second.metrics()["rollout/dropped"] == 0
    seen = (
        trained(second.of_step(2, weights_changed=False))[::2] + trained(second.of_step(3, weights_changed=False))[::2]
    )
    assert sorted(seen) == sorted(set(range(8)) - set(before))[:4]


def killed_and_continued(stopped: bool) -> tuple[list[int], list[StandIn]]:
    """Return the prompts of all steps in order, and the engines, of a run that ends in step 4 and resumes. With
    `stopped`, the checkpoint includes the samples of step 4. Otherwise the checkpoint is from the end of step 3."""
    engine, seen = StandIn(), list[int]()
    responses, state, cursor = in_flight(engine), cast(Kept, {}), dict[str, Any]()
    for step in (1, 2, 3, 4):
        rollouts = responses.of_step(step, weights_changed=False)
        if step == 4:
            break
        seen += trained(rollouts)[::2]
        sync(responses, engine)
        responses.forget(step)
        state, cursor = responses.state_dict(step + 1), responses.cursor_state()
    if stopped:
        responses.pause()
        state, cursor = responses.state_dict(4), responses.cursor_state()
    resumed_engine = StandIn(version=4)
    components = parts(resumed_engine)
    components.cursor.load_state_dict(cursor)
    responses = InFlight(components)
    responses.load_state_dict([state])
    for step in range(4, 9):
        again = responses.of_step(step, weights_changed=False)
        if stopped and step == 4:
            assert trained(again) == trained(rollouts) and torch.equal(
                again.engine_logprob_BR, rollouts.engine_logprob_BR
            )
        seen += trained(again)[::2]
        sync(responses, resumed_engine)
        responses.forget(step)
    return seen, [engine, resumed_engine]


def test_killed_run_trains_each_prompt_once() -> None:
    seen, _ = killed_and_continued(stopped=False)
    assert sorted(seen) == list(range(16))


def test_stopped_run_loses_no_finished_sample() -> None:
    """Finished samples are not generated again, and partial samples continue."""
    seen, engines = killed_and_continued(stopped=True)
    assert sorted(seen) == list(range(16))
    assert sorted([*engines[0].finishes, *engines[1].finishes]) == list(range(32))
    assert any(prefixes[0] for prefixes in engines[1].prefixes.values())


def test_run_resumes_with_other_sizes() -> None:
    """A larger number of prompts changes the selection of groups. A larger number of samples resends all prompts."""
    engine = StandIn()
    first = in_flight(engine)
    before = trained(first.of_step(1, weights_changed=False))
    sync(first, engine)
    first.forget(1)
    first.of_step(2, weights_changed=False)
    first.pause()
    state = first.state_dict(2)
    more_prompts = in_flight(StandIn(version=2), "rollout.prompts_per_step=3")
    more_prompts.load_state_dict([state])
    again = trained(more_prompts.of_step(2, weights_changed=False))
    assert len(again) == 6 and not set(again) & set(before)
    more_samples = in_flight(new_engine := StandIn(version=2), "rollout.samples_per_prompt=3")
    more_samples.load_state_dict([state])
    again = trained(more_samples.of_step(2, weights_changed=False))
    assert (
        len(again) == 6
        and not set(again) & set(before)
        and not any(p for of in new_engine.prefixes.values() for p in of)
    )


def test_run_resumes_with_shorter_responses() -> None:
    """Longer answers are truncated to the new limit. No request asks for less than one token."""
    engine = StandIn()
    first = in_flight(engine)
    first.of_step(1, weights_changed=False)
    first.forget(1)
    engine.tick()
    engine.stuck = frozenset([max(engine.under_way)])
    for _ in range(2):
        engine.tick()
    first.pause()
    state = first.state_dict(2)
    before = read_state(state[KEY])[0].answers
    long = {number for number, answer in before.items() if len(answer.token_ids) > 2}
    assert {before[number].broken_off for number in long} == {False, True}
    second = in_flight(resumed_engine := StandIn(version=2), "rollout.max_response_tokens=2")
    second.load_state_dict([state])
    after = read_state(second.state_dict(2)[KEY])[0].answers
    assert after.keys() == before.keys()
    for number, answer in after.items():
        assert answer.token_ids == before[number].token_ids[:2]
        assert number not in long or (answer.truncated and not answer.broken_off)
    assert [request.max_new_tokens for request, *_ in resumed_engine.under_way.values()] == [1]
    assert resumed_engine.under_way.keys() == engine.stuck


@pytest.mark.parametrize(
    ("now", "expected"),
    [("temperature=1.0", True), ("temperature=0.5", False), ("min_response_tokens=1", False)],
)
def test_responses_of_another_distribution_are_regenerated(now: str, expected: bool) -> None:
    """Their log-probabilities do not match the distribution that is trained."""
    engine = StandIn()
    first = in_flight(engine)
    first.of_step(1, weights_changed=False)
    first.forget(1)
    engine.tick()
    first.pause()
    state = first.state_dict(2)
    second = in_flight(StandIn(version=2), f"rollout.{now}")
    second.load_state_dict([state])
    restored = read_state(second.state_dict(2)[KEY])[0]
    assert bool(restored.answers) == bool(restored.groups) == expected
    assert expected or restored.returned == [group.prompt for group, *_ in read_state(state[KEY])[0].groups]
    waiting = parts(None, "rollout.ahead=0", "rollout.max_lag=null", "rollout.when_stopped=keep")
    answers = [Completion((3, STOP), (-1.0, -1.0), False, 4) for _ in range(4)]
    waiting.answer = lambda _prompts, requests, *_: answers
    before = responses_of(waiting)
    before.of_step(1, weights_changed=False)
    after = parts(None, "rollout.ahead=0", "rollout.max_lag=null", f"rollout.{now}")
    new = Completion((4, STOP), (-1.0, -1.0), False, 5)
    after.answer = lambda _prompts, requests, *_: [new for _ in requests]
    again = responses_of(after)
    again.load_state_dict([before.state_dict(1)])
    repeated = again.of_step(1, weights_changed=False)
    assert {sequence[2:].tolist()[0] for sequence in repeated.sequences} == {3 if expected else 4}


def test_synchronous_run_takes_in_flight_prompts_first() -> None:
    """A later run with prompts in flight continues with the remaining prompts. A run that is stopped within a step
    draws the same prompts again."""
    first = in_flight(engine := StandIn())
    seen = trained(first.of_step(1, weights_changed=False))[::2]
    sync(first, engine)
    first.forget(1)
    state, cursor = first.state_dict(2), first.cursor_state()
    for step in (2, 3):
        components = parts(None, "rollout.ahead=0", "rollout.max_lag=null")
        components.answer = lambda _prompts, requests, *_: [
            Completion((3, STOP), (-1.0, -1.0), False, 4) for _ in requests
        ]
        components.cursor.load_state_dict(cursor)
        responses = responses_of(components)
        responses.load_state_dict([state])
        before = read_state(responses.state_dict(step)[KEY])
        seen += trained(responses.of_step(step, weights_changed=False))[::2]
        assert read_state(responses.state_dict(step)[KEY]) == before
        responses.forget(step)
        state, cursor = responses.state_dict(step + 1), responses.cursor_state()
    components = parts(resumed_engine := StandIn(version=4))
    components.cursor.load_state_dict(cursor)
    last = InFlight(components)
    last.load_state_dict([state])
    for step in range(4, 9):
        seen += trained(last.of_step(step, weights_changed=False))[::2]
        sync(last, resumed_engine)
        last.forget(step)
    assert sorted(seen) == list(range(16))
    assert min(resumed_engine.prefixes) > max(engine.prefixes), (
        "numbers of samples, and therefore seeds, must be used once"
    )


class Silent(StandIn):
    """Omits aborted requests without tokens."""

    def abort(self) -> dict[int, Completion]:
        return {number: answer for number, answer in super().abort().items() if answer.token_ids}

    def finished(self, wait_seconds: float) -> dict[int, Completion]:
        assert self.under_way or self.done, "the omitted requests must be sent again"
        return super().finished(wait_seconds)


def test_aborted_requests_without_tokens_are_resent() -> None:
    responses, seen = in_flight(engine := Silent()), list[int]()
    for step in range(1, 9):
        seen += trained(responses.of_step(step, weights_changed=False))[::2]
        responses.forget(step)
        sync(responses, engine)
    assert sorted(seen) == list(range(16))
    assert any(prefixes[1:] == [0] for prefixes in engine.prefixes.values())


def test_step_takes_more_rounds() -> None:
    """Further rounds are the next finished groups. A resumed step has the same rounds as before. The last step sends
    prompts only for itself."""
    engine = StandIn()
    responses, seen, rounds = in_flight(engine, steps=3), list[list[int]](), list[Rollouts]()
    for step in (1, 2):
        rounds = [responses.of_step(step, weights_changed=False), *(responses.more(step, n, 1) for n in (1, 2))]
        assert [one.sample_ids_B.tolist() for one in rounds] == [[0, 1, 2, 3], [0, 1], [0, 1]]
        assert responses.metrics()["rollout/in_flight"] + responses.metrics()["rollout/waiting"] == 2 * (3 - step)
        seen += [trained(one)[::2] for one in rounds]
        if step == 1:
            responses.forget(1)
            sync(responses, engine)
    responses.pause()
    state = responses.state_dict(2)
    components = parts(resumed_engine := StandIn(version=2), steps=3)
    components.cursor.load_state_dict(responses.cursor_state())
    responses = InFlight(components)
    responses.load_state_dict([state])
    again = [responses.of_step(2, weights_changed=False), *(responses.more(2, n, 1) for n in (1, 2))]
    assert list(map(trained, again)) == list(map(trained, rounds))
    responses.forget(2)
    sync(responses, resumed_engine)
    seen.append(trained(responses.of_step(3, weights_changed=False))[::2])
    assert responses.metrics()["rollout/in_flight"] == 0  # no prompts are sent for later steps
    seen.append(trained(responses.more(3, 1, 2))[::2])
    assert [len(one) for one in seen] == [2, 1, 1, 2, 1, 1, 2, 2]
    assert sorted(prompt for one in seen for prompt in one) == list(range(12))  # each prompt once


def test_replay_reproduces_recorded_steps(tmp_path: Path) -> None:
    """The replay has the same samples in every round, the same metrics and the same cursor. A run that resumes without
    the record trains the prompts that were in flight."""
    engine = StandIn(ticks=2)
    components = parts(engine, "rollout.record_arrivals=true", f"run.directory={tmp_path}", steps=5)
    responses, steps = InFlight(components), list[tuple[list[Rollouts], dict[str, float], dict[str, Any]]]()
    for step in range(1, 6):
        rounds = [responses.of_step(step, weights_changed=False), responses.more(step, 1, 1)]
        steps.append((rounds, responses.metrics(), responses.cursor_state()))
        responses.forget(step)
        sync(responses, engine)
    folder = tmp_path / "arrivals"
    replay = parts(None, f"rollout.replay_arrivals={folder}")
    again = responses_of(replay)
    assert isinstance(again, ReplayedArrivals)
    for step, (rounds, metrics, cursor) in enumerate(steps[:3], 1):
        replayed = [again.of_step(step, weights_changed=False), again.more(step, 1, 1)]
        assert any(one.token_versions_BR is not None and one.token_versions_BR.unique().numel() > 1 for one in replayed)
        for name in (each.name for each in fields(Rollouts)):
            for one, other in zip(rounds, replayed, strict=True):
                assert_equal(getattr(one, name), getattr(other, name))
        assert (again.metrics(), again.cursor_state()) == (metrics, cursor)
        again.forget(step)
    halves = list[int]()
    for rank in (0, 1):  # a replay on two ranks
        replay.runtime = SimpleNamespace(rank=rank, world_size=2, is_main=not rank)
        of_rank = ReplayedArrivals(replay, folder).of_step(2, weights_changed=False)
        assert of_rank.sequences
        for n, sequence in zip(of_rank.sample_ids_B.tolist(), of_rank.sequences, strict=True):
            assert torch.equal(sequence, steps[1][0][0].sequences[n])
            halves.append(n)
    assert sorted(halves) == [0, 1, 2, 3]
    replay.runtime = components.runtime
    again.of_step(3, weights_changed=False)
    with pytest.raises(ValueError, match=r"round 3 of step 3 is not in .*, because rewards or rollout"):
        again.more(3, 2, 1)
    with pytest.raises(ValueError, match="has no step 6; end the replay before that step by run.steps"):
        again.of_step(6, weights_changed=False)
    for setting in ("temperature=0.5", "min_response_tokens=1"):
        other = parts(None, f"rollout.replay_arrivals={folder}", f"rollout.{setting}")
        with pytest.raises(ValueError, match=r"was recorded with another rollout\.temperature, min_response_tokens or"):
            ReplayedArrivals(other, folder).of_step(1, weights_changed=False)
    components = parts(StandIn(version=4))
    components.cursor.load_state_dict(again.cursor_state())
    live, state = InFlight(components), again.state_dict(4)
    live.load_state_dict([state])
    before = [prompt for rounds, _, _ in steps[:3] for one in rounds for prompt in trained(one)[::2]]
    later = [prompt for step in (4, 5, 6) for prompt in trained(live.of_step(step, weights_changed=False))[::2]]
    assert sorted(before + later) == list(range(15))
    again.load_state_dict([live.state_dict(7)])  # the earlier run has no record
    left = read_state(live.state_dict(7)[KEY])[0]
    in_flight_prompts = [group.prompt for group, step, _ in left.groups]
    assert read_state(again.state_dict(7)[KEY])[0].returned == [*in_flight_prompts, *left.returned]
    (folder / "step-000002" / "rank-00000.safetensors").write_bytes(b"12345678")
    with pytest.raises(ValueError, match="rank-00000.safetensors is incomplete"):
        again.of_step(2, weights_changed=False)


def assert_equal(one: Any, other: Any) -> None:
    """Compare tensors, tuples or plain values exactly."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for x, y in zip(one, other, strict=True):
            assert_equal(x, y)
    else:
        assert one == other


def prompts_with_a_curriculum(stop: bool) -> tuple[list[int], list[int]]:
    """Train for more than two epochs with a fixed set of well-answered prompts. With `stop`, resume in step 12 with the
    curriculum of step 11. Return the trained prompts in order, and the number of resting prompts per step."""
    components, seen, resting = (
        parts(StandIn(), "data.curriculum={right_above: 0.5}", steps=40),
        list[int](),
        list[int](),
    )
    responses = InFlight(components)
    for step in range(1, 41):
        prompts = trained(responses.of_step(step, weights_changed=False))[::2]
        if stop and step == 12:
            components.curriculum.note(step, prompts)
            responses.pause()
            saved_responses, cursor, curriculum = (
                responses.state_dict(12),
                responses.cursor_state(),
                components.curriculum.state_dict(11),
            )
            assert not curriculum  # the cursor already has the results
            components = parts(StandIn(version=12), "data.curriculum={right_above: 0.5}", steps=40)
            components.cursor.load_state_dict(cursor)
            components.curriculum.load_state_dict(curriculum)
            responses = InFlight(components)
            responses.load_state_dict([saved_responses])
            assert trained(responses.of_step(step, weights_changed=False))[::2] == prompts
        components.curriculum.note(step, [prompt for prompt in prompts if prompt % 3 == 0])
        seen += prompts
        resting.append(components.cursor.resting)
        responses.forget(step)
        sync(responses, components.engine)
    return seen, resting


def test_well_answered_prompts_rest() -> None:
    """The next step already uses the results of a step. A resumed run draws the same prompts."""
    seen, resting = prompts_with_a_curriculum(stop=False)
    assert resting[0] == 0 and max(resting) >= 8
    # The second epoch ends when every prompt that does not rest has been trained twice.
    second = seen[len(PROMPTS) : len(PROMPTS) + 16]
    assert sum(prompt % 3 == 0 for prompt in second) <= 2 < sum(prompt % 3 == 0 for prompt in seen[:16])
    again, resting_again = prompts_with_a_curriculum(stop=True)
    assert sorted(again) == sorted(seen) and resting_again == resting


class Timed:
    """Generates answers on a simulated clock, with unlimited concurrency. One of 16 prompts takes five times
    as long."""

    version = 1

    def __init__(self, seconds: float) -> None:
        self.now, self._seconds, self._due = 0.0, seconds, dict[int, float]()

    def send(self, requests: Mapping[int, GenerateRequest], params: SamplingParams) -> None:
        for number, request in requests.items():
            self._due[number] = self.now + self._seconds * (5 if request.prompt_id % 16 == 7 else 1)

    def finished(self, wait_seconds: float) -> dict[int, Completion]:
        self.now = max(self.now, min([*self._due.values(), self.now + wait_seconds]))
        done = [number for number, due in self._due.items() if due <= self.now]
        for number in done:
            del self._due[number]
        return {number: Completion((3, STOP), (-1.0, -1.0), False, self.version) for number in done}

    def abort(self) -> dict[int, Completion]:
        raise AssertionError("weights stay")


def test_slow_answers_do_not_delay_steps() -> None:
    """Training takes about a third of the time of the slowest answer. In sequence, both times add up. With requests in
    flight, slow answers start several steps early, and only the first steps wait."""
    seconds, training, steps, size = 0.06, 0.09, 6, 16
    settings = ("rollout.prompts_per_step=16", "rollout.samples_per_prompt=1", "rollout.ahead=4", "rollout.max_lag=4")
    ahead = Timed(seconds)
    responses = in_flight(ahead, *settings, steps=steps)
    for step in range(1, steps + 1):
        assert len(responses.of_step(step, weights_changed=False).responses) == size
        ahead.now += training
        responses.forget(step)
    engine = Timed(seconds)
    for step in range(steps):
        requests = {i: GenerateRequest((2,), 0, i) for i in range(step * size, (step + 1) * size)}
        engine.send(requests, SamplingParams(1.0, 9, (STOP,)))
        answers = dict[int, Completion]()
        while len(answers) < size:
            answers |= engine.finished(0.1)
        engine.now += training
    assert engine.now == pytest.approx(steps * (5 * seconds + training))
    assert engine.now / ahead.now > 3
