"""The thread that the episodes of a rank are played in, and a watch over whether they let each other go on.

Python can interrupt its own code in a thread, but not what waits in C, such as a long sleep. A loop that is blocked is
therefore given up as it is, and another takes its place: whatever is raised in the old thread, and whenever it awakes,
hits nothing that still counts.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import CancelledError
from contextlib import suppress
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

TICK_SECONDS = 0.1
_AGAIN_SECONDS = 1.0
_REACT_SECONDS = 2.0
_CLOSE_SECONDS = 30.0
"""For the workers of tools, which end within their own deadlines."""

OWNER: ContextVar[object | None] = ContextVar("OWNER", default=None)
"""Whose code a task runs: tasks that it starts are its, too."""


class BlockedLoopError(SystemExit):
    """Raised in a thread that was given up because an environment let nothing else run in it. As every SystemExit in a
    task it ends the loop at once, so that no other episode's code is run there once more."""


class _PlayingThread:
    """An event loop in a thread of its own."""

    def __init__(self, on_tick: Callable[[float], None]) -> None:
        self.loop = asyncio.new_event_loop()
        self.ticks = 0
        """Goes on for as long as everybody lets the others go on."""
        self._on_tick, self._last = on_tick, time.monotonic()
        self._owners: WeakKeyDictionary[asyncio.Future[Any], object] = WeakKeyDictionary()
        self._gone, self._lock = False, threading.Lock()
        self.loop.set_task_factory(self._make_task)
        self._thread = threading.Thread(target=self._run, name="megappo-episodes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.call_soon(self._tick)
            while self._goes_on():
                pass
        except BlockedLoopError:
            pass
        finally:
            with self._lock:
                self._gone = True
            for task in asyncio.all_tasks(self.loop):
                coroutine = task.get_coro()
                if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                    coroutine.close()  # nothing of it has run, and Python would warn of that
            self.loop.close()

    def _goes_on(self) -> bool:
        """Run until the loop is stopped, or somebody's task raised what ends a loop; who awaits the task is told."""
        try:
            self.loop.run_forever()
        except BlockedLoopError:
            raise
        except (SystemExit, KeyboardInterrupt):
            return True
        return False

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **given: Any,
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **given)
        if (owner := OWNER.get()) is not None:
            self._owners[task] = owner
        return task

    def _tick(self) -> None:
        self.ticks += 1
        now = time.monotonic()
        passed, self._last = now - self._last, now
        self._on_tick(min(passed, TICK_SECONDS))  # one that blocks the loop costs others nothing
        self.loop.call_later(TICK_SECONDS, self._tick)

    @property
    def owner(self) -> object | None:
        """Whose code runs at this moment; None where that is nobody's, or unknown."""
        task = asyncio.current_task(self.loop)
        return None if task is None else self._owners.get(task)

    def give_up(self) -> None:
        """End everything in it once it can be ended."""

        def end() -> None:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.stop()

        with self._lock:
            if not self._gone:
                self.loop.set_exception_handler(lambda _loop, _context: None)  # nobody is to be told of what is lost
                self.loop.call_soon_threadsafe(end)

    def interrupt(self) -> bool:
        """Raise BlockedLoopError wherever it is, or as soon as it comes out of C; whether there is anything to end."""
        with self._lock:
            if self._gone or not self._thread.is_alive():
                return False
            ident, error = ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(BlockedLoopError)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
            return True

    def join(self, seconds: float) -> None:
        """Wait for its end, at most so long."""
        self._thread.join(seconds)


class WatchedLoop:
    """Runs coroutines in a thread of its own, and in another where one of them blocks it."""

    def __init__(
        self, most_seconds: float, on_tick: Callable[[float], None], on_blocked: Callable[[object], None]
    ) -> None:
        """Begins with the first use.

        Args:
            most_seconds: how long an owner may let nobody else go on.
            on_tick: called in the loop about every `TICK_SECONDS`, with the seconds that passed and that count.
            on_blocked: called with the `OWNER` of what was running, from a thread of the watch, once `loop` is another
                one. Nothing of the old loop goes on.
        """
        self._most_seconds, self._on_tick, self._on_blocked = most_seconds, on_tick, on_blocked
        self._thread: _PlayingThread | None = None
        self._given_up: list[_PlayingThread] = []
        self._closed = threading.Event()
        self._starts = threading.Lock()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that goes on at present."""
        with self._starts:
            if self._thread is None:
                self._thread = _PlayingThread(self._on_tick)
                threading.Thread(target=self._watch, name="megappo-episodes-watch", daemon=True).start()
            return self._thread.loop

    def _watch(self) -> None:
        seen: tuple[object, int, object | None] = (None, 0, None)
        blocked_seconds, asked = 0.0, time.monotonic()
        while not self._closed.wait(TICK_SECONDS):
            thread = self._thread
            assert thread is not None
            owner = thread.owner
            now = (thread, thread.ticks, owner)
            # Counted in looks of this thread: where a busy process lets nobody run, nobody is charged.
            blocked_seconds = blocked_seconds + TICK_SECONDS if now == seen else 0.0
            seen = now
            if owner is not None and blocked_seconds > self._most_seconds:
                self._replace(thread)
                self._on_blocked(owner)
            if time.monotonic() - asked >= _AGAIN_SECONDS:
                asked = time.monotonic()
                self._given_up = [old for old in self._given_up if old.interrupt()]

    def _replace(self, old: _PlayingThread) -> None:
        with self._starts:
            self._thread = _PlayingThread(self._on_tick)
        self._given_up.append(old)
        old.give_up()
        old.interrupt()

    def close(self, farewell: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a last coroutine in the loop and end what is left there. A loop that does not react is left alone."""
        self._closed.set()
        thread = self._thread
        if thread is None:
            return
        with suppress(TimeoutError, CancelledError):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), thread.loop).result(_REACT_SECONDS)
            asyncio.run_coroutine_threadsafe(self._end(farewell), thread.loop).result(_CLOSE_SECONDS)
        for old in (*self._given_up, thread):
            old.give_up()
        thread.join(_AGAIN_SECONDS)
        for old in (*self._given_up, thread):
            old.interrupt()

    @staticmethod
    async def _end(farewell: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await farewell()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_AGAIN_SECONDS)
        await asyncio.get_running_loop().shutdown_default_executor()
