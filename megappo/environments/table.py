"""The episodes that a rank plays at the same time: what each of them waits for, and how it ended.

Episodes run in the thread of `WatchedLoop`, answers come from the threads of an engine, and the trainer waits in its
own. One lock guards all that they share; blocking calls are made outside of it.
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
from megappo.plugins import failure_words, raised_at
from megappo.runtime.interrupts import Stop
from megappo.types import Prompt

Failure = Literal["", "raised", "hung", "nonsense"]


class EpisodeStart(NamedTuple):
    """Start of an episode."""

    number: int
    prompt: Prompt
    request: GenerateRequest
    """Request with the prompt's tokens and the seed of the sample."""


@dataclass
class House:
    """What the tables of a run share; read from any thread."""

    stage: EnvironmentContext
    """Replaced when the loop moves to another thread."""
    loop: WatchedLoop
    engine: Engine
    stop: Stop


@dataclass(eq=False)
class Playing(Owner):
    """State of an episode that is being played."""

    began: EpisodeStart
    session: Session
    task: asyncio.Task[None] | None = None
    wanted: GenerateRequest | None = None
    """Request for the turn that the episode waits for."""
    answer: asyncio.Future[Completion] | None = None
    sent: bool = False
    """Whether the request was sent and its answer is outstanding."""
    heard: list[tuple[GenerateRequest, Completion]] = field(default_factory=list)
    """Turns that the episode has had."""
    again: deque[tuple[GenerateRequest, Completion]] = field(default_factory=deque)
    """Turns from before the episode was restarted, which answer its requests as long as these are the same."""
    owed: GenerateRequest | None = None
    """Request whose answer is outstanding though the environment does not wait for it, until it is asked again."""
    partial: tuple[GenerateRequest, Completion] | None = None
    """Turn that was broken off, with the tokens that were made."""


class Table:
    """Episodes that are played with one engine; a `TurnDriver`."""

    def __init__(
        self, house: House, params: SamplingParams, done: MutableMapping[int, Completion] | None = None
    ) -> None:
        """`done`: samples of episodes that are over, by number."""
        self.done = done if done is not None else {}
        self.playing: dict[int, Playing] = {}
        self.error: BaseException | None = None
        """Error that ends the run and is no episode's fault."""
        self._house, self._params = house, params
        self._stream: RequestStream | None = None
        self._thinking = 0
        """Number of episodes that wait for no answer of the engine."""
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)

    def begin(self, episodes: Iterable[EpisodeStart]) -> None:
        """Begin episodes."""
        with self._lock:
            for episode in episodes:
                self._begin(episode)

    def _begin(self, wanted: EpisodeStart) -> Playing:
        shared, number = self._house.stage.shared, wanted.number
        session = Session(wanted.prompt, wanted.request, shared, self._params, lambda request: self._ask(new, request))
        new = self.playing[number] = Playing(wanted, session)
        self._thinking += 1
        self._house.loop.loop.call_soon_threadsafe(self._start, new)
        return new

    # In the thread of the loop

    def _start(self, playing: Playing) -> None:
        if self.playing.get(playing.began.number) is not playing:
            return
        token = OWNER.set(playing)
        try:
            playing.task = asyncio.get_running_loop().create_task(self._play(playing))
        finally:
            OWNER.reset(token)

    async def _ask(self, playing: Playing, request: GenerateRequest) -> Completion:
        with self._lock:
            if self.playing.get(playing.began.number) is not playing:
                raise asyncio.CancelledError
            if playing.again:
                before, completion = playing.again.popleft()
                if before == request:
                    playing.heard.append((request, completion))
                    return completion
                playing.again.clear()
            playing.wanted, playing.answer = request, asyncio.get_running_loop().create_future()
            if playing.partial is not None and playing.partial[0] != request:
                playing.partial = None
            if playing.owed == request:
                playing.owed, playing.sent = None, True
            elif playing.owed is None:
                self._send(playing)
            self._thinking -= 1
            self._tell()
        try:
            return await playing.answer
        except asyncio.CancelledError:
            self._let_go(playing, request)
            raise

    def _let_go(self, playing: Playing, request: GenerateRequest) -> None:
        """Note that the environment no longer waits for this turn; it may ask for it again."""
        with self._lock:
            if self.playing.get(playing.began.number) is playing and playing.wanted is request:
                playing.owed = request if playing.sent else playing.owed
                playing.wanted, playing.sent = None, False
                self._thinking += 1

    async def _play(self, playing: Playing) -> None:
        failure: Failure = ""
        limit: Limit | Literal[""] = ""
        told = ""
        session = playing.session
        try:
            session.finish(await self._house.stage.environment.run(session))
        except LimitReached as reached:
            limit = reached.limit
            if not session.turns:
                failure, told = "nonsense", f"reached its limit of {reached.unit} before the model's first turn"
        except RunError as error:
            self.error = error
        except NonsenseError as error:
            line = raised_at(error)
            failure, told = "nonsense", f"{error} ({line})" if line else str(error)
        except asyncio.CancelledError:
            failure, told = "hung", self._too_long
        except BlockedLoopError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what an environment raises is a failed sample
            failure, told = "raised", failure_words(error)
        self._end(playing, failure, told, limit)

    def count_seconds(self, seconds: float) -> None:
        """Charge `seconds` to every episode that does not wait for engine or tools, and end those that take too
        long."""
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
        return self._house.stage.shared.limits.max_seconds

    @property
    def _too_long(self) -> str:
        return f"took more than {self._most_seconds:g} seconds"

    def _end(self, playing: Playing, failure: Failure, told: str, limit: Limit | Literal[""] = "") -> None:
        """Record how an episode ended, the first time it does."""
        with self._lock:
            if self.playing.get(playing.began.number) is not playing:
                return
            del self.playing[playing.began.number]
            self._thinking -= playing.wanted is None
            self.done[playing.began.number] = playing.session.completion(
                failure=failure, reason=told, limit=limit, version=self._house.engine.version
            )
            PROGRESS.add(EPISODES, 1)
            self._tell(always=True)

    def _send(self, playing: Playing) -> None:
        wanted = playing.wanted
        if self._stream is None or self._stream.is_over or wanted is None:
            return
        if playing.partial is not None:
            most, least = wanted.most_tokens(self._params), wanted.least_tokens(self._params)
            wanted = continued(wanted, playing.partial[1], most, least)
        self._stream.send(playing.began.number, wanted)
        playing.sent = True

    def _tell(self, *, always: bool = False) -> None:
        if always or not self._thinking:
            self._news.notify_all()

    def answered(self, number: int, completion: Completion) -> None:
        """See `TurnDriver.answered`."""
        self.answer({number: completion})

    def answer(self, found: Mapping[int, Completion]) -> None:
        """Deliver answers, all of them before any of these episodes continues."""
        with self._lock:
            asked: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Completion], Completion]]] = {}
            for number, completion in found.items():
                playing = self.playing.get(number)  # an episode that hung may be gone
                request = None if playing is None else playing.owed or playing.wanted
                if playing is None or request is None:
                    continue
                whole = self._whole(playing, request, completion)
                if playing.owed is not None:
                    self._answer_owed(playing, request, whole)
                elif whole is None:
                    playing.sent = False
                elif playing.answer is not None:
                    playing.heard.append((request, whole))
                    playing.wanted, playing.sent = None, False
                    self._thinking += 1
                    asked.setdefault(playing.answer.get_loop(), []).append((playing.answer, whole))
            for loop, answers in asked.items():
                loop.call_soon_threadsafe(_hand_out, answers)

    def _whole(self, playing: Playing, request: GenerateRequest, news: Completion) -> Completion | None:
        """A turn with the tokens from before it was broken off; None where it was broken off again."""
        before = None if playing.partial is None else playing.partial[1]
        if news.broken_off and not news.token_ids:
            return None
        found = stopped(joined(before, news), self._params)
        found = ended(found, self._params.stop_token_ids, request.most_tokens(self._params))
        # A turn with a token that the model has no row for is not continued: the session refuses it.
        goes_on = found.broken_off and without_row(found.token_ids, self._house.stage.shared.vocabulary) is None
        playing.partial = (request, found) if goes_on else None
        return None if goes_on else found

    def _answer_owed(self, playing: Playing, request: GenerateRequest, whole: Completion | None) -> None:
        playing.owed = None
        if playing.wanted is not None:  # the environment asked for something else, so that this answer is not needed
            playing.partial = None
            self._send(playing)
        elif whole is not None:
            playing.again.append((request, whole))

    def begin_again(self, blocking: Owner) -> None:
        """Restart all episodes in another loop, with the turns that they had, except the one that blocks the old loop,
        which counts as hung."""
        with self._lock:
            for old in list(self.playing.values()):
                if old is blocking:
                    self._end(old, "hung", self._too_long)
                    continue
                old.session.is_over = True
                self._thinking -= old.wanted is None
                new = self._begin(old.began)
                new.again = deque([*old.heard, *old.again])
                new.owed = old.wanted if old.sent else old.owed
                new.partial = old.partial
            self._tell(always=True)

    # In the thread of the trainer

    def use(self, stream: RequestStream) -> None:
        """Send waiting requests, and later ones, over this stream. Earlier streams owe nothing any more."""
        with self._lock:
            if self._stream is not stream:
                self._stream = stream
                for playing in self.playing.values():
                    playing.sent, playing.owed = False, None
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
        """Wait until each episode waits for the engine or is over; returns the requests by number."""
        self._wait(lambda: not self._thinking)
        with self._lock:
            waiting = {number: p for number, p in sorted(self.playing.items()) if p.wanted is not None}
            for playing in waiting.values():
                playing.sent = True
            return {number: p.wanted for number, p in waiting.items() if p.wanted is not None}

    def _wait(self, holds: Callable[[], bool]) -> None:
        with self._news:
            while not holds() and not self._house.stop.asked:
                self._news.wait(TICK_SECONDS)

    def leave(self) -> None:
        """Drop all episodes that are left."""
        with self._lock:
            self.give_up([*self.playing])
            self._stream = None

    # Of episodes that are in flight

    def begun(self) -> int:
        """Number of episodes under way in which the model has made tokens."""
        with self._lock:
            return sum(bool(p.heard or p.again or p.partial) for p in self.playing.values())

    def halt(self) -> None:
        """Send nothing until there is a stream again."""
        with self._lock:
            self._stream = None

    def resume(self) -> None:
        """Send requests again that were broken off, where there is a stream."""
        with self._lock:
            for playing in self.playing.values():
                if not playing.sent and playing.owed is None:
                    self._send(playing)

    def take_done(self, wait_seconds: float) -> dict[int, Completion]:
        """Samples of episodes that are over and were not taken yet; waits at most `wait_seconds` for the first."""
        with self._news:
            if not self.done:
                self._news.wait(wait_seconds)
            found = dict(self.done)
            self.done.clear()
            return found

    def give_up(self, numbers: Iterable[int]) -> None:
        """Drop these episodes."""
        with self._lock:
            for number in numbers:
                self.done.pop(number, None)
                if (playing := self.playing.pop(number, None)) is not None:
                    self._thinking -= playing.wanted is None
                    playing.session.is_over = True
                    if playing.task is not None:
                        with suppress(RuntimeError):  # its loop was given up and has ended
                            playing.task.get_loop().call_soon_threadsafe(playing.task.cancel)


def _hand_out(answers: Iterable[tuple[asyncio.Future[Completion], Completion]]) -> None:
    for answer, completion in answers:
        if not answer.done():
            answer.set_result(completion)
