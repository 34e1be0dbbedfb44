"""Concurrent episodes of a rank: the answers that they wait for, and their results.

Episodes run in the thread of `WatchedLoop`. Answers come from the threads of an engine. The trainer waits in its own
thread. One lock guards all shared state. Blocking calls are made outside the lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megappo.config.tokens import without_row
from megappo.engines.protocol import Completion, Engine, GenerateRequest, RequestStream, SamplingParams
from megappo.engines.stopping import stopped
from megappo.engines.stretches import continued, ended, joined
from megappo.environments.loop import OWNER, TICK_SECONDS, BlockedLoopError, Owner, WatchedLoop
from megappo.environments.protocol import Limit, LimitReached, NonsenseError
from megappo.environments.registry import EnvironmentContext
from megappo.environments.session import Session
from megappo.errors import RunError
from megappo.observe.progress import EPISODES, PROGRESS
from megappo.plugins import failure_text, raised_at
from megappo.runtime.interrupts import Stop
from megappo.types import Prompt

Failure = Literal["", "raised", "hung", "nonsense"]


class EpisodeStart(NamedTuple):
    """Start of an episode."""

    number: int
    prompt: Prompt
    request: GenerateRequest
    """Request with the tokens of the prompt and the seed of the sample."""


@dataclass
class EpisodePool:
    """State that the tables of a run share. Read from any thread."""

    stage: EnvironmentContext
    """Replaced when the loop moves to another thread."""
    loop: WatchedLoop
    engine: Engine
    stop: Stop


@dataclass(eq=False)
class RunningEpisode(Owner):
    """State of a running episode."""

    began: EpisodeStart
    session: Session
    task: asyncio.Task[None] | None = None
    awaited: GenerateRequest | None = None
    """Request for the turn that the episode waits for."""
    answer: asyncio.Future[Completion] | None = None
    sent: bool = False
    """True if the request was sent and its answer is outstanding."""
    past_turns: list[tuple[GenerateRequest, Completion]] = field(default_factory=list)
    """Past turns of the episode."""
    again: deque[tuple[GenerateRequest, Completion]] = field(default_factory=deque)
    """Turns from before a restart of the episode. They answer its requests while the requests are identical."""
    abandoned: GenerateRequest | None = None
    """Request with an outstanding answer that the environment no longer waits for. The environment may repeat the
    request."""
    partial: tuple[GenerateRequest, Completion] | None = None
    """Interrupted turn with its generated tokens."""


class Table:
    """Episodes that run with one engine. Implements `TurnDriver`."""

    def __init__(
        self, pool: EpisodePool, params: SamplingParams, done: MutableMapping[int, Completion] | None = None
    ) -> None:
        """`done`: samples of finished episodes by number."""
        self.done = done if done is not None else {}
        self.playing: dict[int, RunningEpisode] = {}
        self.error: BaseException | None = None
        """Error that ends the run and was not caused by an episode."""
        self._pool, self._params = pool, params
        self._stream: RequestStream | None = None
        self._thinking = 0
        """Number of episodes that do not wait for an answer of the engine."""
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)

    def begin(self, episodes: Iterable[EpisodeStart]) -> None:
        """Start episodes."""
        with self._lock:
            for episode in episodes:
                self._begin(episode)

    def _begin(self, start: EpisodeStart) -> RunningEpisode:
        shared, number = self._pool.stage.shared, start.number
        session = Session(
            start.prompt, start.request, shared, self._params, lambda request: self._request_turn(new, request)
        )
        new = self.playing[number] = RunningEpisode(start, session)
        self._thinking += 1
        self._pool.loop.loop.call_soon_threadsafe(self._start, new)
        return new

    # In the thread of the loop

    def _start(self, playing: RunningEpisode) -> None:
        if self.playing.get(playing.began.number) is not playing:
            return
        token = OWNER.set(playing)
        try:
            playing.task = asyncio.get_running_loop().create_task(self._play(playing))
        finally:
            OWNER.reset(token)

    async def _request_turn(self, playing: RunningEpisode, request: GenerateRequest) -> Completion:
        with self._lock:
            if self.playing.get(playing.began.number) is not playing:
                raise asyncio.CancelledError
            if playing.again:
                before, completion = playing.again.popleft()
                if before == request:
                    playing.past_turns.append((request, completion))
                    return completion
                playing.again.clear()
            playing.awaited, playing.answer = request, asyncio.get_running_loop().create_future()
            if playing.partial is not None and playing.partial[0] != request:
                playing.partial = None
            if playing.abandoned == request:
                playing.abandoned, playing.sent = None, True
            elif playing.abandoned is None:
                self._send(playing)
            self._thinking -= 1
            self._notify()
        try:
            return await playing.answer
        except asyncio.CancelledError:
            self._let_go(playing, request)
            raise

    def _let_go(self, playing: RunningEpisode, request: GenerateRequest) -> None:
        """Record that the environment no longer waits for this turn. The environment may request the turn again."""
        with self._lock:
            if self.playing.get(playing.began.number) is playing and playing.awaited is request:
                playing.abandoned = request if playing.sent else playing.abandoned
                playing.awaited, playing.sent = None, False
                self._thinking += 1

    async def _play(self, playing: RunningEpisode) -> None:
        failure: Failure = ""
        limit: Limit | Literal[""] = ""
        cause = ""
        session = playing.session
        try:
            session.finish(await self._pool.stage.environment.run(session))
        except LimitReached as reached:
            limit = reached.limit
            if not session.turns:
                failure, cause = "nonsense", f"reached its limit of {reached.unit} before the model's first turn"
        except RunError as error:
            self.error = error
        except NonsenseError as error:
            line = raised_at(error)
            failure, cause = "nonsense", f"{error} ({line})" if line else str(error)
        except asyncio.CancelledError:
            failure, cause = "hung", self._too_long
        except BlockedLoopError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - fails only the sample of the environment
            failure, cause = "raised", failure_text(error)
        self._end(playing, failure, cause, limit)

    def count_seconds(self, seconds: float) -> None:
        """Charge `seconds` to every episode that does not wait for engine or tools. End episodes over the time
        limit."""
        with self._lock:
            for playing in list(self.playing.values()):
                session = playing.session
                if not session.waits:
                    session.spent_seconds += seconds
                    if session.spent_seconds > self._most_seconds and playing.task is not None:
                        playing.task.cancel()
                        self._end(playing, "hung", self._too_long)

    # In any thread

    @property
    def _most_seconds(self) -> float:
        return self._pool.stage.shared.limits.max_seconds

    @property
    def _too_long(self) -> str:
        return f"took more than {self._most_seconds:g} seconds"

    def _end(self, playing: RunningEpisode, failure: Failure, cause: str, limit: Limit | Literal[""] = "") -> None:
        """Record the end of an episode once."""
        with self._lock:
            if self.playing.get(playing.began.number) is not playing:
                return
            del self.playing[playing.began.number]
            self._thinking -= playing.awaited is None
            self.done[playing.began.number] = playing.session.completion(
                failure=failure, reason=cause, limit=limit, version=self._pool.engine.version
            )
            PROGRESS.add(EPISODES, 1)
            self._notify(always=True)

    def _send(self, playing: RunningEpisode) -> None:
        request = playing.awaited
        if self._stream is None or self._stream.is_over or request is None:
            return
        if playing.partial is not None:
            most, least = request.most_tokens(self._params), request.least_tokens(self._params)
            request = continued(request, playing.partial[1], most, least)
        self._stream.send(playing.began.number, request)
        playing.sent = True

    def _notify(self, *, always: bool = False) -> None:
        if always or not self._thinking:
            self._news.notify_all()

    def answered(self, number: int, completion: Completion) -> None:
        """See `TurnDriver.answered`."""
        self.answer({number: completion})

    def answer(self, completions: Mapping[int, Completion]) -> None:
        """Deliver all answers before any of these episodes continues."""
        with self._lock:
            by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Completion], Completion]]] = {}
            for number, completion in completions.items():
                playing = self.playing.get(number)  # a hanging episode may have ended
                request = None if playing is None else playing.abandoned or playing.awaited
                if playing is None or request is None:
                    continue
                whole = self._whole(playing, request, completion)
                if playing.abandoned is not None:
                    self._store_abandoned(playing, request, whole)
                elif whole is None:
                    playing.sent = False
                elif playing.answer is not None:
                    playing.past_turns.append((request, whole))
                    playing.awaited, playing.sent = None, False
                    self._thinking += 1
                    by_loop.setdefault(playing.answer.get_loop(), []).append((playing.answer, whole))
            for loop, answers in by_loop.items():
                loop.call_soon_threadsafe(_hand_out, answers)

    def _whole(self, playing: RunningEpisode, request: GenerateRequest, news: Completion) -> Completion | None:
        """Return a turn with the tokens from before its interruption, or None if the turn was interrupted again."""
        before = None if playing.partial is None else playing.partial[1]
        if news.broken_off and not news.token_ids:
            return None
        turn = stopped(joined(before, news), self._params)
        turn = ended(turn, self._params.stop_token_ids, request.most_tokens(self._params))
        # A turn with a token that has no embedding row is not continued. The session refuses such a turn.
        goes_on = turn.broken_off and without_row(turn.token_ids, self._pool.stage.shared.vocabulary) is None
        playing.partial = (request, turn) if goes_on else None
        return None if goes_on else turn

    def _store_abandoned(self, playing: RunningEpisode, request: GenerateRequest, whole: Completion | None) -> None:
        playing.abandoned = None
        if playing.awaited is not None:  # the environment requested another turn, so this answer is not needed
            playing.partial = None
            self._send(playing)
        elif whole is not None:
            playing.again.append((request, whole))

    def begin_again(self, blocking: Owner) -> None:
        """Restart all episodes in another loop with their past turns. The episode that blocks the old loop counts as
        hung."""
        with self._lock:
            for old in list(self.playing.values()):
                if old is blocking:
                    self._end(old, "hung", self._too_long)
                    continue
                old.session.is_over = True
                self._thinking -= old.awaited is None
                new = self._begin(old.began)
                new.again = deque([*old.past_turns, *old.again])
                new.abandoned = old.awaited if old.sent else old.abandoned
                new.partial = old.partial
            self._notify(always=True)

    # In the thread of the trainer

    def use(self, stream: RequestStream) -> None:
        """Send waiting and later requests over this stream. Outstanding answers of earlier streams are discarded."""
        with self._lock:
            if self._stream is not stream:
                self._stream = stream
                for playing in self.playing.values():
                    playing.sent, playing.abandoned = False, None
                    self._send(playing)

    def drive(self, stream: RequestStream) -> int:
        """See `TurnDriver.drive`."""
        self.use(stream)
        try:
            self._wait(lambda: not self.playing or stream.is_over)
        finally:
            self.halt()
        return len(self.playing)

    def round(self) -> dict[int, GenerateRequest]:
        """Wait until each episode waits for the engine or has ended, and return the requests by number."""
        self._wait(lambda: not self._thinking)
        with self._lock:
            waiting = {number: p for number, p in sorted(self.playing.items()) if p.awaited is not None}
            for playing in waiting.values():
                playing.sent = True
            return {number: p.awaited for number, p in waiting.items() if p.awaited is not None}

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._news:
            while not condition() and not self._pool.stop.requested:
                self._news.wait(TICK_SECONDS)

    def leave(self) -> None:
        """Drop all remaining episodes."""
        with self._lock:
            self.give_up([*self.playing])
            self._stream = None

    # For episodes in flight

    def begun(self) -> int:
        """Return the number of running episodes in which the model has generated tokens."""
        with self._lock:
            return sum(bool(p.past_turns or p.again or p.partial) for p in self.playing.values())

    def halt(self) -> None:
        """Send nothing until there is a new stream."""
        with self._lock:
            self._stream = None

    def resume(self) -> None:
        """Send interrupted requests again if there is a stream."""
        with self._lock:
            for playing in self.playing.values():
                if not playing.sent and playing.abandoned is None:
                    self._send(playing)

    def take_done(self, wait_seconds: float) -> dict[int, Completion]:
        """Take the samples of finished episodes. Waits at most `wait_seconds` for the first sample."""
        with self._news:
            if not self.done:
                self._news.wait(wait_seconds)
            samples = dict(self.done)
            self.done.clear()
            return samples

    def give_up(self, numbers: Iterable[int]) -> None:
        """Drop these episodes."""
        with self._lock:
            for number in numbers:
                self.done.pop(number, None)
                if (playing := self.playing.pop(number, None)) is not None:
                    self._thinking -= playing.awaited is None
                    playing.session.is_over = True
                    if playing.task is not None:
                        with suppress(RuntimeError):  # the loop was abandoned and has ended
                            playing.task.get_loop().call_soon_threadsafe(playing.task.cancel)


def _hand_out(answers: Iterable[tuple[asyncio.Future[Completion], Completion]]) -> None:
    for answer, completion in answers:
        if not answer.done():
            answer.set_result(completion)
