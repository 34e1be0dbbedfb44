"""Tests of episodes that run in the background of training, and of blocking episodes."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.config import load_config
from megappo.data.cursor import Cursor
from megappo.engines.protocol import Completion, SamplingParams
from megappo.engines.requests import RequestTracker
from megappo.environments.episodes import EpisodePool
from megappo.environments.loop import WatchedLoop
from megappo.environments.protocol import Environment
from megappo.environments.session import Session
from megappo.errors import Interrupted
from megappo.models.stop_texts import StopTexts
from megappo.ppo.rollout.sampling import sample_seed
from megappo.ppo.rollout.scheduler import RolloutScheduler
from megappo.runtime.waiting import wait_until
from megappo.types import Rollouts
from tests.support.episodes import (
    PARAMS,
    TOKENIZER,
    FlyingEngine,
    PromptEngine,
    SayingEngine,
    episode_pool,
    prompts_and_requests,
    text_of,
)
from tests.support.places import BASE, TINY

pytestmark = pytest.mark.usefixtures("world_of_one")


class Turns:
    """Plays a fixed number of turns. Rewards each turn with its number."""

    def __init__(self, turns: int = 3) -> None:
        self._turns = turns
        self.threads: set[str] = set()

    async def run(self, session: Session) -> float:
        self.threads.add(threading.current_thread().name)
        for number in range(self._turns):
            reply = await session.generate()
            session.reward(number)
            session.observe(f"you said {reply.text}.")
        return 1.0


def reply_text(request: Any) -> str:
    return f"t{len(request.token_ids)} {request.seed % 7}"


def submitted_and_finished(pool: EpisodePool, count: int, seconds: float) -> list[Completion]:
    """Return the samples of episodes that run without a waiting caller."""
    episodes = pool.submit(*prompts_and_requests(count), PARAMS)
    assert any(episode.answer is None for episode in episodes)
    assert wait_until(lambda: all(episode.future.done() for episode in episodes), seconds, every_seconds=0.01)
    return [episode.future.result() for episode in episodes]


def test_episodes_run_during_training_with_same_results() -> None:
    """The caller does not wait for the episodes. Every way to play the episodes gives the same results."""
    environment = Turns()
    pool = episode_pool(environment, PromptEngine(reply_text, lambda request: 0.001))
    ahead = submitted_and_finished(pool, 20, 60)
    again = pool.generate(*prompts_and_requests(20), PARAMS)
    pool.close()
    in_rounds = episode_pool(Turns(), SayingEngine(reply_text))
    expected = in_rounds.generate(*prompts_and_requests(20), PARAMS)
    in_rounds.close()
    assert ahead == again == expected
    for completions in (ahead, again, expected):
        assert [c.episode and c.episode.turns for c in completions] == [c.episode and c.episode.turns for c in expected]
    assert environment.threads == {"megappo-episodes"}


class Blocking:
    """Of ten samples, one sleeps in C, one never ends and one blocks in a separate task. Each blocks in its second
    turn."""

    def __init__(self) -> None:
        self.awake = threading.Event()
        self.spins = 0

    async def run(self, session: Session) -> float:
        number = session.seed - 1000
        await session.generate()
        session.observe("on")
        await session.generate()
        match number % 10:
            case 3:
                self.awake.wait(3600)
            case 5:
                while True:
                    self.spins += 1
            case 7:
                await asyncio.gather(self._sleep(), asyncio.sleep(0))
        session.observe("on")
        await session.generate()
        return 1.0

    async def _sleep(self) -> None:
        time.sleep(3600)


def test_blocking_episode_fails_only_its_own_sample() -> None:
    """No caller waits for the episodes. The other episodes start again in another thread and keep their turns. The old
    thread ends when its blocking call returns."""
    environment, answered, existing = Blocking(), Counter[tuple[int, int]](), set(threading.enumerate())

    def counted(request: Any) -> str:
        answered[request.prompt_id, len(request.token_ids)] += 1
        return "ok"

    pool = episode_pool(environment, PromptEngine(counted), max_seconds=0.5)
    completions = submitted_and_finished(pool, 20, 100)
    failures = [c.episode.failure for c in completions if c.episode is not None]
    assert failures == ["hung" if number % 10 in (3, 5, 7) else "" for number in range(20)]
    texts = {text_of(c.token_ids) for c, failure in zip(completions, failures, strict=True) if not failure}
    assert texts == {"ok<|im_end|>onok<|im_end|>onok<|im_end|>"}
    assert set(answered.values()) == {1}  # no turn is generated twice
    spins = environment.spins  # the endless loop has ended; sleeps in C end with the event
    environment.awake.set()
    pool.close()
    assert spins == environment.spins
    threads = [t for t in threading.enumerate() if t.name == "megappo-episodes" and t not in existing]
    assert wait_until(lambda: sum(t.is_alive() for t in threads) <= 2, 60, every_seconds=0.01)


class LaterStop:
    """Interrupts a run after `requested` is set."""

    requested = False

    def check(self) -> None:
        if self.requested:
            raise Interrupted(signal.SIGTERM)


@pytest.mark.parametrize("kind", [PromptEngine, SayingEngine])
def test_stopped_run_does_not_wait_for_episodes(kind: type[SayingEngine]) -> None:
    """One episode waits forever and one blocks the event loop. Completed episodes are kept."""

    class Endless:
        async def run(self, session: Session) -> float:
            await session.generate()
            if session.seed == 1001:
                await asyncio.Event().wait()
            if session.seed == 1002:
                stop.requested = True
                threading.Event().wait(3600)
            return 1.0

    stop = LaterStop()
    pool = episode_pool(Endless(), kind(reply_text, stop=stop), max_seconds=3600.0)
    episodes = pool.submit(*prompts_and_requests(3), PARAMS)
    with pytest.raises(Interrupted):
        while not all(episode.future.done() for episode in episodes):
            pool.advance(1.0)
    done = [episode.answer for episode in episodes]
    pool.close()
    assert done[1:] == [None, None] and done[0] is not None and done[0].episode is not None
    assert done[0].episode.turns[-1].reward == 1.0


class Impatient:
    """Cancels a turn after a timeout and requests a turn again. One sample exits in a
    separate task."""

    async def run(self, session: Session) -> float:
        number = session.seed - 1000
        with suppress(TimeoutError):
            await asyncio.wait_for(session.generate(), 0.05)
        if number == 1:
            session.observe("well")
        if number == 2:
            await asyncio.gather(self._exit())
        await session.generate()
        return 1.0

    async def _exit(self) -> None:
        sys.exit(3)


def test_cancelled_turn_is_requested_again() -> None:
    pool = episode_pool(Impatient(), PromptEngine(reply_text, lambda request: 0.3))
    completions = pool.generate(*prompts_and_requests(3), PARAMS)
    pool.close()
    assert [c.episode and c.episode.failure for c in completions] == ["", "", "raised"]
    assert [text_of(c.token_ids) for c in completions[:2]] == ["t3 6<|im_end|>", "wellt7 0<|im_end|>"]


def test_busy_process_blames_no_task() -> None:
    """The tasks run in sequence. Together the tasks exceed the limit of a single task."""
    blamed = list[object]()
    loop = WatchedLoop(0.3, lambda seconds: None, blamed.append)

    async def work() -> None:
        for _ in range(8):
            time.sleep(0.1)
            await asyncio.sleep(0)

    asyncio.run_coroutine_threadsafe(work(), loop.loop).result(60)

    async def nothing() -> None:
        return

    loop.close(nothing)
    assert not blamed


def in_flight(
    engine: FlyingEngine,
    state: Mapping[str, Any] | None = None,
    environment: Environment | None = None,
    params: SamplingParams = PARAMS,
) -> tuple[RolloutScheduler, EpisodePool]:
    """Return the scheduler and the episodes: two prompts of two samples per step, two steps ahead."""
    overrides = ("rollout.ahead=2", "rollout.max_lag=2", "rollout.prompts_per_step=2", f"model.path={TINY}")
    config = load_config(str(BASE), [*overrides, "rollout.samples_per_prompt=2"])
    prompts, _ = prompts_and_requests(20)
    tracker = RequestTracker(engine, len(TOKENIZER))
    pool = episode_pool(environment or Turns(2), engine, tracker=tracker, max_failure_fraction=1.0)
    parts: Any = SimpleNamespace(
        config=config,
        engine=engine,
        requests=tracker,
        episodes=pool,
        generation=None,
        cursor=Cursor(len(prompts), 3, False, fingerprint="data"),
        train_prompts=prompts,
        runtime=SimpleNamespace(rank=0, world_size=1),
        tokenizer=TOKENIZER,
        vocabulary=len(TOKENIZER),
        answerer="the engine",
        derived=SimpleNamespace(steps=9),
        curriculum=None,
        sampling=lambda most, trained_on: params,
    )
    if state is not None:
        parts.cursor.load_state_dict(state)
    return RolloutScheduler(parts), pool


def sync(responses: RolloutScheduler, engine: FlyingEngine) -> None:
    responses.pause()
    engine.version += 1
    responses.go_on()


def check(rollouts: Rollouts) -> None:
    """Check that turns are complete and that each token has its weight version."""
    assert {text_of(s[3:].tolist()) for s in rollouts.sequences} == {"okay<|im_end|>you said okay.okay<|im_end|>"}
    own_BR, versions_BR = rollouts.response_mask_BR, rollouts.token_versions_BR
    assert versions_BR is not None and torch.equal(versions_BR[own_BR], -rollouts.engine_logprob_BR[own_BR].long())
    assert rollouts.weight_versions_B.tolist() == versions_BR.masked_fill(~own_BR, 99).amin(-1).tolist()
    assert rollouts.episodes is not None and not rollouts.episodes.failed_B.any()


def test_turns_continue_after_weight_sync() -> None:
    """An interrupted turn continues from its tokens with another seed. Its environment only waits longer."""
    responses, pool = in_flight(engine := FlyingEngine(lambda request: "okay"))
    several = 0
    for step in range(1, 6):
        rollouts = responses.of_step(step, weights_changed=False)
        check(rollouts)
        versions_BR = rollouts.token_versions_BR
        assert versions_BR is not None and engine.version - versions_BR[rollouts.response_mask_BR].min() <= 2
        several += sum(len(set(v[m].tolist())) > 1 for v, m in zip(versions_BR, rollouts.response_mask_BR, strict=True))
        responses.forget(step)
        assert wait_until(lambda: engine.has_requests, 60, every_seconds=0.001)  # sent by the thread of the episodes
        sync(responses, engine)
        numbers = responses.metrics()
        assert numbers["rollout/dropped"] == numbers["episode/begun_anew"] == 0 and numbers["rollout/partial"] > 0
    pool.close()
    assert several
    seeds = [request.seed for request in engine.sent]
    assert len(set(seeds)) == len(seeds)


def test_stop_text_ends_only_the_turn() -> None:
    params = replace(PARAMS, stop_texts=StopTexts(("</a>",), TOKENIZER))
    responses, pool = in_flight(FlyingEngine(lambda request: "okay</a>"), params=params)
    rollouts = responses.of_step(1, weights_changed=False)
    pool.close()
    expected = "okay</a>you said okay</a>.okay</a>"
    assert [text_of(s[3:].tolist()) for s in rollouts.sequences] == [expected] * 4
    assert rollouts.episodes is not None
    for sequence, episode in zip(rollouts.sequences, rollouts.episodes.of_samples, strict=True):
        assert [text_of(sequence[3:][turn.start : turn.stop].tolist()) for turn in episode.turns] == ["okay</a>"] * 2


class CancelsTurn:
    """Observes a text after the first turn, and cancels the next turn."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    async def run(self, session: Session) -> float:
        await session.generate()
        session.observe("again")
        turn = asyncio.ensure_future(session.generate())
        await asyncio.sleep(0)
        turn.cancel()
        with suppress(asyncio.CancelledError):
            await turn
        if self._fails:
            raise ValueError("gave up")
        return 1.0


@pytest.mark.parametrize("fails", [False, True])
def test_observation_without_next_turn_is_dropped(fails: bool) -> None:
    """The dropped tokens have no weight version. From the third step on, first turns have two versions each."""
    responses, pool = in_flight(engine := FlyingEngine(lambda request: "okay"), environment=CancelsTurn(fails=fails))
    several = 0
    for step in range(1, 5):
        rollouts = responses.of_step(step, weights_changed=False)
        assert {text_of(s[3:].tolist()) for s in rollouts.sequences} == {"okay<|im_end|>"}
        assert rollouts.episodes is not None and rollouts.episodes.failed_B.tolist() == [fails] * 4
        assert rollouts.token_versions_BR is not None
        several += sum(len(set(versions.tolist())) > 1 for versions in rollouts.token_versions_BR)
        responses.forget(step)
        assert wait_until(lambda: engine.has_requests, 60, every_seconds=0.001)
        sync(responses, engine)
    pool.close()
    assert several
    texts = [text_of(request.token_ids) for request in engine.sent]
    assert any("again" in text for text in texts)
    assert all(text.endswith("again") for text in texts if "again" in text)  # cancelled turns are not continued


@pytest.mark.waits
def test_resumed_run_keeps_completed_episodes() -> None:
    """Completed episodes are bitwise identical, in the order of their prompts. Other episodes start again."""
    stuck = {sample_seed(load_config(str(BASE)).run.seed, -3, number) for number in (4, 5, 9)}
    responses, pool = in_flight(engine := FlyingEngine(lambda request: "okay", stuck))
    responses.of_step(1, weights_changed=False)
    responses.forget(1)
    sync(responses, engine)
    before = responses.of_step(2, weights_changed=False)
    responses.pause()
    state, cursor = responses.state_dict(2), responses.cursor_state()
    running = {request.conversation for request in engine.sent} & stuck
    pool.close()
    responses, pool = in_flight(engine := FlyingEngine(lambda request: "okay"), cursor)
    engine.version = 8
    responses.load_state_dict([state])
    after = responses.of_step(2, weights_changed=False)
    assert torch.equal(before.engine_logprob_BR, after.engine_logprob_BR)
    assert all(map(torch.equal, before.sequences, after.sequences))
    assert before.episodes is not None and after.episodes is not None
    assert before.episodes.of_samples == after.episodes.of_samples
    numbers = responses.metrics()
    assert numbers["episode/begun_anew"] >= len(running) > 0
    assert wait_until(lambda: {r.conversation for r in [*engine.sent]} >= running, 60.0, every_seconds=0.01)
    responses.forget(2)
    sync(responses, engine)
    check(responses.of_step(3, weights_changed=False))
    pool.close()
