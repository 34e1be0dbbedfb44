"""The thread in which a rank's episodes run, and a watch that notices when one of them blocks the others.

Python can interrupt Python code in a thread, but not a call that waits in C, such as a long sleep. A blocked loop is
therefore abandoned, and another takes its place. Whenever the old thread wakes up, and whatever is raised in it, no
episode that still counts is affected.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import CancelledError
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

TICK_SECONDS = 0.1
_AGAIN_SECONDS = 1.0
_REACT_SECONDS = 2.0
_CLOSE_SECONDS = 30.0
"""Seconds that workers of tools have to end, which they do within their own deadlines."""

T = TypeVar("T")


class Owner:
    """Whom the code of a task belongs to: an episode."""


OWNER: ContextVar[Owner | None] = ContextVar("OWNER", default=None)
"""Owner of the code that a task runs; tasks that it starts inherit the owner."""


class BlockedLoopError(SystemExit):
    """Raised in a thread that was given up because an environment blocked it. As a SystemExit it ends the event loop at
    once, so that no other episode's code runs there again."""


class _PlayingThread:
    """An event loop in a thread of its own."""

    def __init__(self, on_tick: Callable[[float], None]) -> None:
        self.loop = asyncio.new_event_loop()
        self.ticks = 0
        """Counter that grows as long as no task blocks the loop."""
        self._on_tick, self._last = on_tick, time.monotonic()
        self._owners: WeakKeyDictionary[asyncio.Future[Any], Owner] = WeakKeyDictionary()
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
                    coroutine.close()  # it never ran, of which Python would warn
            self.loop.close()

    def _goes_on(self) -> bool:
        """Run the loop until it is stopped (False), or until a task raised an exception that ends a loop (True), which
        the task's awaiter gets."""
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
        coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
        **given: Any,
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coroutine, loop=loop, **given)
        if (owner := OWNER.get()) is not None:
            self._owners[task] = owner
        return task

    def _tick(self) -> None:
        self.ticks += 1
        now = time.monotonic()
        passed, self._last = now - self._last, now
        self._on_tick(min(passed, TICK_SECONDS))  # time in which one episode blocks the loop is not charged to others
        self.loop.call_later(TICK_SECONDS, self._tick)

    @property
    def owner(self) -> Owner | None:
        """Owner of the code that runs at this moment; None where it has none, or is unknown."""
        task = asyncio.current_task(self.loop)
        return None if task is None else self._owners.get(task)

    def give_up(self) -> None:
        """Cancel all tasks and stop the loop, as soon as it can react."""

        def end() -> None:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.stop()

        with self._lock:
            if not self._gone:
                self.loop.set_exception_handler(lambda _loop, _context: None)  # errors of a lost loop are not reported
                self.loop.call_soon_threadsafe(end)

    def interrupt(self) -> bool:
        """Raise BlockedLoopError in the thread, as soon as it is outside of C code. Returns whether there is still a
        thread to end."""
        with self._lock:
            if self._gone or not self._thread.is_alive():
                return False
            ident, error = ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(BlockedLoopError)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
            return True

    def join(self, seconds: float) -> None:
        """Wait for the thread's end, at most `seconds`."""
        self._thread.join(seconds)


class WatchedLoop:
    """Runs coroutines in a thread of its own, and moves to another thread when one of them blocks it."""

    def __init__(
        self, most_seconds: float, on_tick: Callable[[float], None], on_blocked: Callable[[Owner], None]
    ) -> None:
        """Make the loop; its thread starts with the first use.

        Args:
            most_seconds: how long an owner may block all others.
            on_tick: called in the loop about every `TICK_SECONDS`, with the seconds that passed and that count.
            on_blocked: called with the `OWNER` of the blocking code, from the watch's thread, after `loop` was
                replaced. Nothing in the old loop continues.
        """
        self._most_seconds, self._on_tick, self._on_blocked = most_seconds, on_tick, on_blocked
        self._thread: _PlayingThread | None = None
        self._given_up: list[_PlayingThread] = []
        self._closed = threading.Event()
        self._starts = threading.Lock()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The current event loop."""
        with self._starts:
            if self._thread is None:
                self._thread = _PlayingThread(self._on_tick)
                threading.Thread(target=self._watch, name="megappo-episodes-watch", daemon=True).start()
            return self._thread.loop

    def _watch(self) -> None:
        seen: tuple[_PlayingThread | None, int, Owner | None] = (None, 0, None)
        blocked_seconds, asked = 0.0, time.monotonic()
        while not self._closed.wait(TICK_SECONDS):
            thread = self._thread
            assert thread is not None
            owner = thread.owner
            now = (thread, thread.ticks, owner)
            # Counted in checks of this thread, not by the clock: where the whole process stands still, no episode is
            # charged for it.
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

    def close(self, farewell: Callable[[], Awaitable[None]]) -> None:
        """Run a last coroutine in the loop, then end everything that is left there. A loop that does not react is
        abandoned."""
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
    async def _end(farewell: Callable[[], Awaitable[None]]) -> None:
        await farewell()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_AGAIN_SECONDS)
        await asyncio.get_running_loop().shutdown_default_executor()
