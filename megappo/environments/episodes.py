"""Concurrent episodes of a rank. Each episode is a coroutine that awaits the answers of the engine.

Episodes run in the thread of `WatchedLoop`. Answers come from the threads of an engine. The trainer waits in its own
thread. One lock guards all shared state. The thread of the episodes runs no collectives, because ranks would call them
in different orders and hang.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from megappo.engines.protocol import Completion, Engine, GenerateRequest, SamplingParams
from megappo.engines.requests import LONG_WAIT_SECONDS, RequestTracker, TrackedRequest
from megappo.environments.loop import OWNER, TICK_SECONDS, BlockedLoopError, Owner, WatchedLoop
from megappo.environments.registry import EnvironmentContext
from megappo.environments.session import Session
from megappo.environments.turns import Limit, LimitReached, NonsenseError
from megappo.errors import RunError
from megappo.observe.terminal.progress import EPISODES, PROGRESS
from megappo.plugins import failure_text, raised_at
from megappo.runtime.ranks.objects import all_gather_objects
from megappo.runtime.watch.interrupts import Stop
from megappo.types import Prompt

Failure = Literal["", "raised", "hung", "nonsense"]


class TooManyFailuresError(RunError):
    """More than `rollout.environment.max_failure_fraction` of the episodes of a step failed."""


@dataclass(eq=False)
class RunningEpisode(Owner):
    """An episode and its requests to the engine."""

    prompt: Prompt
    request: GenerateRequest
    """Request with the tokens of the prompt and the seed of the sample."""
    params: SamplingParams
    future: Future[Completion] = field(default_factory=Future)
    """Receives the sample of the episode."""
    turns: list[TrackedRequest] = field(default_factory=list)
    """Requests in order. A restarted episode receives the same answers as long as its requests are identical."""
    session: Session | None = None
    position: int = 0
    """Number of turns that this run of the episode has requested."""
    awaited: asyncio.Future[Completion] | None = None
    """Answer that the episode waits for."""
    task: asyncio.Task[None] | None = None

    @property
    def answer(self) -> Completion | None:
        """The sample, or None while the episode is running."""
        return self.future.result() if self.future.done() and not self.future.cancelled() else None

    @property
    def has_tokens(self) -> bool:
        """Whether the model has generated tokens."""
        return any(turn.answer is not None for turn in self.turns)


class EpisodePool:
    """Runs the episodes of a rank. An engine without the capability `concurrent` receives one turn of every unfinished
    episode at a time, so that a repeated run makes the same requests."""

    def __init__(self, stage: EnvironmentContext, engine: Engine, tracker: RequestTracker, stop: Stop) -> None:
        self._stage, self._engine, self._tracker, self._stop = stage, engine, tracker, stop
        self._limits = stage.shared.limits
        self._loop = WatchedLoop(self._limits.max_seconds, self._count_seconds, self._restart)
        self._running: dict[RunningEpisode, None] = {}
        """Unfinished episodes in the order of submission."""
        self._ready: list[tuple[RunningEpisode, TrackedRequest]] = []
        """Turns to submit."""
        self._computing = 0
        """Number of episodes that do not wait for an answer of the engine."""
        self._error: BaseException | None = None
        """Error that ends the run and was not caused by an episode."""
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)

    # In the thread of the trainer

    def submit(
        self, prompts: Sequence[Prompt], requests: Sequence[GenerateRequest], params: SamplingParams
    ) -> list[RunningEpisode]:
        """Start episodes and return immediately. `max_new_tokens` limits all tokens after the prompt."""
        episodes = [RunningEpisode(p, r, params) for p, r in zip(prompts, requests, strict=True)]
        with self._lock:
            for episode in episodes:
                self._begin(episode)
        return episodes

    def advance(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
        """Poll the engine. All ranks call this method. Raises the exceptions of `Engine.poll`."""
        is_concurrent = self._engine.capabilities.concurrent
        if not is_concurrent:
            with self._news:  # wait until each episode waits for the engine or has ended
                while self._computing and not self._stop.requested:
                    self._news.wait(TICK_SECONDS)
            self._submit_turns()
        self._engine.poll(wait_seconds, weights_changed=weights_changed)
        with self._news:
            count = len(self._running)
            if is_concurrent and self._computing and not self._stop.requested:
                self._news.wait_for(lambda: not self._computing or len(self._running) < count, wait_seconds)

    def generate(
        self, prompts: Sequence[Prompt], requests: Sequence[GenerateRequest], params: SamplingParams
    ) -> list[Completion]:
        """Return one sample per request. All ranks call this method. Raises as `advance` and `check_failures`."""
        PROGRESS.expect(EPISODES, len(requests))
        episodes = self.submit(prompts, requests, params)
        try:
            while any(all_gather_objects(not all(episode.future.done() for episode in episodes))):
                self.advance(LONG_WAIT_SECONDS)
        finally:
            self.cancel(episodes)
        completions = [episode.future.result() for episode in episodes]
        self.check_failures(completions)
        return completions

    def check_failures(self, completions: Sequence[Completion]) -> None:
        """Raise on every rank if any rank has an error, or if too many episodes of all ranks failed. A collective.

        Raises RunError and TooManyFailuresError.
        """
        failed = [c.episode for c in completions if c.episode is not None and c.episode.failure]
        first = f"{failed[0].failure}: {failed[0].reason}" if failed else ""
        facts = all_gather_objects((len(failed), len(completions), first, str(self._error or "")))
        errors = [of_rank for _, _, _, of_rank in facts if of_rank]
        if errors:
            raise RunError(errors[0])
        count, total = sum(fact[0] for fact in facts), sum(fact[1] for fact in facts)
        most = self._limits.max_failure_fraction
        if count > most * total:
            first = next(first for _, _, first, _ in facts if first)
            raise TooManyFailuresError(
                f"{count} of {total} episodes failed, more than rollout.environment.max_failure_fraction {most:g}; "
                f"fix the environment; the first: {first}"
            )

    @property
    def begun(self) -> int:
        """Number of unfinished episodes in which the model has generated tokens."""
        with self._lock:
            return sum(episode.has_tokens for episode in self._running)

    def cancel(self, episodes: Iterable[RunningEpisode]) -> None:
        """Drop unfinished episodes."""
        with self._lock:
            for episode in episodes:
                if episode in self._running:
                    self._remove(episode)
                    episode.future.cancel()
                    self._abandon(episode)

    def close(self) -> None:
        """Close the tools, the gateway and the loop, including the remains of hanging episodes."""
        self.cancel([*self._running])
        shared = self._stage.shared
        shared.tools.close()
        self._loop.close(shared.gateway.close)

    # In any thread, with the lock

    def _begin(self, episode: RunningEpisode) -> None:
        episode.position, episode.awaited, episode.task = 0, None, None
        request_turn = partial(self._request_turn, episode)
        shared = self._stage.shared
        episode.session = Session(episode.prompt, episode.request, shared, episode.params, request_turn)
        self._running[episode] = None
        self._computing += 1
        self._loop.loop.call_soon_threadsafe(self._start, episode, episode.session)

    def _remove(self, episode: RunningEpisode) -> None:
        del self._running[episode]
        self._computing -= episode.awaited is None
        _drop_turns(episode.turns)
        self._news.notify_all()

    @staticmethod
    def _abandon(episode: RunningEpisode) -> None:
        """End the coroutine of an episode."""
        if episode.session is not None:
            episode.session.is_over = True
        if episode.task is not None:
            with suppress(RuntimeError):  # the loop was abandoned and has ended
                episode.task.get_loop().call_soon_threadsafe(episode.task.cancel)

    def _end(self, episode: RunningEpisode, failure: Failure, cause: str, limit: Limit | Literal[""] = "") -> None:
        """Record the end of an episode once."""
        with self._lock:
            if episode not in self._running:
                return
            assert episode.session is not None
            self._remove(episode)
            version = self._engine.version
            sample = episode.session.completion(failure=failure, reason=cause, limit=limit, version=version)
            PROGRESS.add(EPISODES, 1)
            episode.future.set_result(sample)

    # In the thread of the loop

    def _start(self, episode: RunningEpisode, session: Session) -> None:
        if episode.session is not session or episode not in self._running:
            return
        token = OWNER.set(episode)
        try:
            episode.task = asyncio.get_running_loop().create_task(self._run(episode, session))
        finally:
            OWNER.reset(token)

    async def _run(self, episode: RunningEpisode, session: Session) -> None:
        failure: Failure = ""
        limit: Limit | Literal[""] = ""
        cause = ""
        try:
            session.finish(await self._stage.environment.run(session))
        except LimitReached as reached:
            limit = reached.limit
            if not session.turns:
                failure, cause = "nonsense", f"reached its limit of {reached.unit} before the model's first turn"
        except RunError as error:
            self._error = error
        except NonsenseError as error:
            line = raised_at(error)
            failure, cause = "nonsense", f"{error} ({line})" if line else str(error)
        except asyncio.CancelledError:
            failure, cause = "hung", self._too_long
        except BlockedLoopError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - fails only the sample of the environment
            failure, cause = "raised", failure_text(error)
        if episode.session is session:
            self._end(episode, failure, cause, limit)

    async def _request_turn(self, episode: RunningEpisode, request: GenerateRequest) -> Completion:
        """Return the answer to a turn. A repeated request receives the answer to its first submission."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        with self._lock:
            if episode not in self._running:
                raise asyncio.CancelledError
            if [turn.request for turn in episode.turns[episode.position :][:1]] != [request]:
                _drop_turns(episode.turns[episode.position :])
                episode.turns[episode.position :] = [TrackedRequest(request, episode.params)]
                self._ready.append((episode, episode.turns[-1]))
            turn = episode.turns[episode.position]
            episode.position += 1
            episode.awaited = answer
            self._computing -= 1
            self._news.notify_all()
        if self._engine.capabilities.concurrent:
            self._submit_turns()
        turn.future.add_done_callback(partial(self._deliver, episode, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            self._withdraw(episode, answer)
            raise

    def _submit_turns(self) -> None:
        """Submit the new turns of all episodes, in the order of the episodes."""
        with self._lock:
            ready, self._ready = self._ready, []
            numbers = {episode: number for number, episode in enumerate(self._running)}
            turns = [(numbers[e], turn) for e, turn in ready if e in numbers and turn in e.turns]
        self._tracker.submit([turn for _, turn in sorted(turns, key=lambda numbered: numbered[0])])

    def _deliver(
        self, episode: RunningEpisode, answer: asyncio.Future[Completion], completion: Future[Completion]
    ) -> None:
        """Deliver the answer to a turn. Called from any thread."""
        with self._lock:
            if episode.awaited is not answer or episode not in self._running:
                return
            episode.awaited = None
            self._computing += 1
        with suppress(RuntimeError):  # the loop was abandoned and has ended
            answer.get_loop().call_soon_threadsafe(_set_result, answer, completion.result())

    def _withdraw(self, episode: RunningEpisode, answer: asyncio.Future[Completion]) -> None:
        """Record that the environment no longer waits for a turn. The environment may request the turn again."""
        with self._lock:
            if episode.awaited is answer and episode in self._running:
                episode.awaited = None
                episode.position -= 1
                self._computing += 1

    # Called by the loop and its watch

    @property
    def _too_long(self) -> str:
        return f"took more than {self._limits.max_seconds:g} seconds"

    def _count_seconds(self, seconds: float) -> None:
        """Charge `seconds` to every episode that does not wait for engine or tools. End episodes over the time
        limit."""
        with self._lock:
            for episode in [*self._running]:
                session = episode.session
                if session is not None and not session.waits:
                    session.spent_seconds += seconds
                    if session.spent_seconds > self._limits.max_seconds and episode.task is not None:
                        episode.task.cancel()
                        self._end(episode, "hung", self._too_long)

    def _restart(self, blocking: Owner) -> None:
        """Restart all episodes in another loop. The episode that blocks the old loop counts as hung."""
        before, self._stage = self._stage, self._stage.again()
        with self._lock:
            for episode in [*self._running]:
                if episode is blocking:
                    self._end(episode, "hung", self._too_long)
                    continue
                assert episode.session is not None
                episode.session.is_over = True
                self._computing -= episode.awaited is None
                self._begin(episode)
        before.shared.tools.close()


def _drop_turns(turns: Iterable[TrackedRequest]) -> None:
    """Drop unanswered requests. An interrupted request is not continued."""
    for turn in turns:
        turn.future.cancel()


def _set_result(answer: asyncio.Future[Completion], completion: Completion) -> None:
    if not answer.done():
        answer.set_result(completion)
