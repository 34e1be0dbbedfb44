"""Tests of the scheduler: steps take prompts in flight, also after a resumption."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megappo.engines.protocol import Completion, GenerateRequest, PauseMode, SamplingParams
from megappo.ppo.reports.measures import rollout_metrics
from megappo.ppo.rollout.in_flight_state import KEY, read_state
from megappo.ppo.rollout.scheduler import RolloutScheduler
from megappo.ppo.rollout.step_samples import Kept
from megappo.types import Rollouts
from tests.support.in_flight import (
    ONE_AHEAD,
    PROMPTS,
    STOP,
    SYNCHRONOUS,
    Constant,
    Holding,
    StandIn,
    parts,
    scheduler,
    sync,
    trained,
)

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_steps_take_groups_while_weights_change() -> None:
    engine = StandIn(ticks=2)
    responses, seen = scheduler(engine), list[int]()
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
        assert len(engine.running) <= 12
        responses.forget(step)
        sync(responses, engine)
    assert sorted(seen) == list(range(16)) and sorted(engine.finishes) == list(range(32))  # each sample once
    assert max(len(prefixes) for prefixes in engine.prefixes.values()) > 1  # some requests were resumed


def test_engine_may_hold_running_requests() -> None:
    """Requests keep running while weights change. A stop of the run aborts the requests."""
    engine = Holding(ticks=2)
    responses, mixed = scheduler(engine), 0
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
    first = scheduler(engine)
    before = trained(first.of_step(1, weights_changed=False))
    engine.stuck = frozenset(range(100))
    first.forget(1)
    sync(first, engine)
    sync(first, engine)  # now the requests lag by three versions
    state = first.state_dict(2)
    engine = StandIn(version=4)
    second = scheduler(engine, "rollout.ahead=2", "rollout.max_lag=2")
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
    responses, state, cursor = scheduler(engine), cast(Kept, {}), dict[str, Any]()
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
    responses = RolloutScheduler(components)
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
    first = scheduler(engine)
    before = trained(first.of_step(1, weights_changed=False))
    sync(first, engine)
    first.forget(1)
    first.of_step(2, weights_changed=False)
    first.pause()
    state = first.state_dict(2)
    more_prompts = scheduler(StandIn(version=2), "rollout.prompts_per_step=3")
    more_prompts.load_state_dict([state])
    again = trained(more_prompts.of_step(2, weights_changed=False))
    assert len(again) == 6 and not set(again) & set(before)
    more_samples = scheduler(new_engine := StandIn(version=2), "rollout.samples_per_prompt=3")
    more_samples.load_state_dict([state])
    again = trained(more_samples.of_step(2, weights_changed=False))
    assert len(again) == 6 and not set(again) & set(before)
    assert not any(p for of in new_engine.prefixes.values() for p in of)


def test_run_resumes_with_shorter_responses() -> None:
    """Longer answers are truncated to the new limit. No request asks for less than one token."""
    engine = StandIn()
    first = scheduler(engine)
    first.of_step(1, weights_changed=False)
    first.forget(1)
    engine.tick()
    engine.stuck = frozenset([max(engine.running)])
    for _ in range(2):
        engine.tick()
    first.pause()
    state = first.state_dict(2)
    before = read_state(state[KEY])[0].answers
    long = {number for number, answer in before.items() if len(answer.token_ids) > 2}
    assert {before[number].broken_off for number in long} == {False, True}
    second = scheduler(resumed_engine := StandIn(version=2), "rollout.max_response_tokens=2")
    second.load_state_dict([state])
    after = read_state(second.state_dict(2)[KEY])[0].answers
    assert after.keys() == before.keys()
    for number, answer in after.items():
        assert answer.token_ids == before[number].token_ids[:2]
        assert number not in long or (answer.truncated and not answer.broken_off)
    assert [running.request.max_new_tokens for running in resumed_engine.running.values()] == [1]
    assert resumed_engine.running.keys() == engine.stuck


@pytest.mark.parametrize(
    ("now", "expected"),
    [("temperature=1.0", True), ("temperature=0.5", False), ("min_response_tokens=1", False)],
)
def test_responses_of_another_distribution_are_regenerated(now: str, expected: bool) -> None:
    """Their log-probabilities do not match the distribution that is trained."""
    engine = StandIn()
    first = scheduler(engine)
    first.of_step(1, weights_changed=False)
    first.forget(1)
    engine.tick()
    first.pause()
    state = first.state_dict(2)
    second = scheduler(StandIn(version=2), f"rollout.{now}")
    second.load_state_dict([state])
    restored = read_state(second.state_dict(2)[KEY])[0]
    assert bool(restored.answers) == bool(restored.groups) == expected
    assert expected or restored.returned == [group.prompt for group, *_ in read_state(state[KEY])[0].groups]
    before = scheduler(Constant(), *SYNCHRONOUS, "rollout.when_stopped=keep")
    before.of_step(1, weights_changed=False)
    again = scheduler(Constant(token=4, version=5), *SYNCHRONOUS, f"rollout.{now}")
    again.load_state_dict([before.state_dict(1)])
    repeated = again.of_step(1, weights_changed=False)
    assert {sequence[2:].tolist()[0] for sequence in repeated.sequences} == {3 if expected else 4}


def test_synchronous_run_takes_in_flight_prompts_first() -> None:
    """A later run with prompts in flight continues with the remaining prompts. A run that is stopped within a step
    draws the same prompts again."""
    first = scheduler(engine := StandIn())
    seen = trained(first.of_step(1, weights_changed=False))[::2]
    sync(first, engine)
    first.forget(1)
    state, cursor = first.state_dict(2), first.cursor_state()

    def synchronous(state: Kept, cursor: dict[str, Any]) -> RolloutScheduler:
        components = parts(Constant(), *SYNCHRONOUS)
        components.cursor.load_state_dict(cursor)
        resumed = RolloutScheduler(components)
        resumed.load_state_dict([state])
        return resumed

    for step in (2, 3):
        responses, returned = synchronous(state, cursor), read_state(state[KEY])[0]
        left = [*(group.prompt for group, *_ in returned.groups), *returned.returned]
        prompts = trained(responses.of_step(step, weights_changed=False))
        stopped = read_state(responses.state_dict(step)[KEY])[0]
        assert [*(group.prompt for group, *_ in stopped.groups), *stopped.returned] == left and not stopped.answers
        again = synchronous(responses.state_dict(step), responses.cursor_state())
        assert trained(again.of_step(step, weights_changed=False)) == prompts
        seen += prompts[::2]
        responses.forget(step)
        state, cursor = responses.state_dict(step + 1), responses.cursor_state()
    components = parts(resumed_engine := StandIn(version=4))
    components.cursor.load_state_dict(cursor)
    last = RolloutScheduler(components)
    last.load_state_dict([state])
    for step in range(4, 9):
        seen += trained(last.of_step(step, weights_changed=False))[::2]
        sync(last, resumed_engine)
        last.forget(step)
    assert sorted(seen) == list(range(16))
    assert min(resumed_engine.prefixes) > max(engine.prefixes), (
        "numbers of samples, and therefore seeds, must be used once"
    )


@pytest.mark.parametrize(("step", "when_stopped"), [(1, "drop"), (1, "keep"), (2, "drop")])
def test_stopped_run_one_step_ahead_keeps_finished_samples(step: int, when_stopped: str) -> None:
    """The finished samples of the next step are always kept. Those of the step in training are kept on request, or if
    they were finished at the end of the previous step."""
    settings = (*ONE_AHEAD, f"rollout.when_stopped={when_stopped}")
    first = scheduler(engine := StandIn(ticks=3), *settings)
    for earlier in range(1, step):
        first.of_step(earlier, weights_changed=False)
        first.begin(earlier + 1)
        first.settle(weights_changed=False)
        first.forget(earlier)
        first.state_dict(earlier + 1)
    before = first.of_step(step, weights_changed=False)
    first.begin(step + 1)
    engine.poll(1.0)
    own, later, unfinished = {*range(4 * step - 4, 4 * step)}, {*range(4 * step, 4 * step + 4)}, {*engine.running}
    dropped = own if (step, when_stopped) == (1, "drop") else set()
    assert 0 < len(unfinished) < 4
    first.pause(stops=True)
    state = first.state_dict(step)
    assert read_state(state[KEY])[0].answers.keys() == (own | later) - unfinished - dropped
    components = parts(engine := StandIn(), *settings)
    components.cursor.load_state_dict(first.cursor_state())
    second = RolloutScheduler(components)
    second.load_state_dict([state])
    second.settle(weights_changed=False)
    assert not engine.prefixes, "the step has not begun"
    again = second.of_step(step, weights_changed=False)
    assert trained(again) == trained(before) and all(map(torch.equal, again.sequences, before.sequences))
    assert engine.prefixes.keys() == dropped, "the next step has not begun"
    second.begin(step + 1)
    second.settle(weights_changed=False)
    assert trained(second.of_step(step + 1, weights_changed=False))[::2] == [2 * step, 2 * step + 1]
    assert {*engine.finishes} == unfinished | dropped
    assert all(prefixes == [0] for prefixes in engine.prefixes.values())


def test_restarted_engine_may_get_the_newer_weights_once() -> None:
    """Samples that finish after the restart have the next version."""

    class Restarted(StandIn):
        def poll(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
            super().poll(wait_seconds)
            self.version += weights_changed

    responses = scheduler(engine := Restarted(), *ONE_AHEAD)
    rollouts = responses.of_step(1, weights_changed=True)
    assert engine.version == 2 and set(rollouts.weight_versions_B.tolist()) == {1}
    assert rollouts.engine_logprob_BR[rollouts.response_mask_BR].unique().tolist() == [-2.0, -1.0]


def test_aborted_requests_without_tokens_are_resent() -> None:
    responses, seen = scheduler(engine := StandIn()), list[int]()
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
    responses, seen, rounds = scheduler(engine, steps=3), list[list[int]](), list[Rollouts]()
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
    responses = RolloutScheduler(components)
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


def prompts_with_a_curriculum(stop: bool) -> tuple[list[int], list[int]]:
    """Train for more than two epochs with a fixed set of well-answered prompts. With `stop`, resume in step 12 with the
    curriculum of step 11. Return the trained prompts in order, and the number of resting prompts per step."""
    components, seen, resting = (
        parts(StandIn(), "data.curriculum={right_above: 0.5}", steps=40),
        list[int](),
        list[int](),
    )
    responses = RolloutScheduler(components)
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
            responses = RolloutScheduler(components)
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


class Timed(StandIn):
    """Generates answers on a simulated clock, with unlimited concurrency. One of 16 prompts takes five times
    as long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.now, self._seconds, self._due = 0.0, seconds, dict[Future[Completion], float]()

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        factors = [5 if request.prompt_id % 16 == 7 else 1 for request in requests]
        new = {Future[Completion](): self.now + self._seconds * factor for factor in factors}
        self._due |= new
        return [*new]

    def poll(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
        self.now = max(self.now, min([*self._due.values(), self.now + wait_seconds]))
        for future in [future for future, due in self._due.items() if due <= self.now]:
            del self._due[future]
            future.set_result(Completion((3, STOP), (-1.0, -1.0), False, self.version))

    def pause(self, mode: PauseMode) -> None:
        raise AssertionError("weights stay")


def test_slow_answers_do_not_delay_steps() -> None:
    """Training takes about a third of the time of the slowest answer. In sequence, both times add up. With requests in
    flight, slow answers start several steps early, and only the first steps wait."""
    seconds, training, steps, size = 0.06, 0.09, 6, 16
    settings = ("rollout.prompts_per_step=16", "rollout.samples_per_prompt=1", "rollout.ahead=4", "rollout.max_lag=4")
    ahead = Timed(seconds)
    responses = scheduler(ahead, *settings, steps=steps)
    for step in range(1, steps + 1):
        assert len(responses.of_step(step, weights_changed=False).responses) == size
        ahead.now += training
        responses.forget(step)
    engine = Timed(seconds)
    for step in range(steps):
        requests = [GenerateRequest((2,), 0, i) for i in range(step * size, (step + 1) * size)]
        answers = engine.submit(requests, SamplingParams(1.0, 9, (STOP,)))
        while not all(answer.done() for answer in answers):
            engine.poll(0.1)
        engine.now += training
    assert engine.now == pytest.approx(steps * (5 * seconds + training))
    assert engine.now / ahead.now > 3
