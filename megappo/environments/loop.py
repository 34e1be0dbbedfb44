"""Thread of a rank's episodes, with a watch that detects an episode that blocks the other episodes.

Python can interrupt Python code in a thread, but not a blocking call in C, such as a long sleep. A blocked loop is
therefore abandoned and replaced. When the old thread continues, its code and its exceptions affect no running
episode.
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
"""Seconds for the shutdown of tool workers, which have their own shorter deadlines."""

T = TypeVar("T")


class Owner:
    """Owner of the code of a task: an episode."""


OWNER: ContextVar[Owner | None] = ContextVar("OWNER", default=None)
"""Owner of the code of a task. Tasks that are started by the task inherit the owner."""


class BlockedLoopError(SystemExit):
    """Raised in a thread that was abandoned because an environment blocked the thread.

    A SystemExit ends the event loop immediately, so that no code of other episodes runs in the thread again.
    """


class _PlayingThread:
    """An event loop in a separate thread."""

    def __init__(self, on_tick: Callable[[float], None]) -> None:
        self.loop = asyncio.new_event_loop()
        self.ticks = 0
        """Counter that increases while no task blocks the loop."""
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
                    coroutine.close()  # avoids Python's warning about a coroutine that never ran
            self.loop.close()

    def _goes_on(self) -> bool:
        """Run the loop until it stops.

        Returns False if the loop was stopped, and True if a task raised an exception that ends a loop. The awaiter of
        the task receives this exception.
        """
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
        **options: Any,
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        if (owner := OWNER.get()) is not None:
            self._owners[task] = owner
        return task

    def _tick(self) -> None:
        self.ticks += 1
        now = time.monotonic()
        passed, self._last = now - self._last, now
        self._on_tick(min(passed, TICK_SECONDS))  # other episodes are not charged while an episode blocks the loop
        self.loop.call_later(TICK_SECONDS, self._tick)

    @property
    def owner(self) -> Owner | None:
        """Owner of the code that is running now. None if there is no owner or the owner is unknown."""
        task = asyncio.current_task(self.loop)
        return None if task is None else self._owners.get(task)

    def give_up(self) -> None:
        """Cancel all tasks and stop the loop as soon as the loop can react."""

        def end() -> None:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.stop()

        with self._lock:
            if not self._gone:
                # Errors of an abandoned loop are not reported.
                self.loop.set_exception_handler(lambda _loop, _context: None)
                self.loop.call_soon_threadsafe(end)

    def interrupt(self) -> bool:
        """Raise BlockedLoopError in the thread as soon as the thread leaves C code.

        Returns whether the thread is still alive.
        """
        with self._lock:
            if self._gone or not self._thread.is_alive():
                return False
            ident, error = ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(BlockedLoopError)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
            return True

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` for the end of the thread."""
        self._thread.join(seconds)


class WatchedLoop:
    """Runs coroutines in a separate thread, and moves to another thread if a coroutine blocks the thread."""

    def __init__(
        self, most_seconds: float, on_tick: Callable[[float], None], on_blocked: Callable[[Owner], None]
    ) -> None:
        """Create the loop. The thread starts with the first use.

        Args:
            most_seconds: time for which an owner may block other owners.
            on_tick: called in the loop about every `TICK_SECONDS` with the elapsed seconds to charge.
            on_blocked: called with the `OWNER` of the blocking code, from the thread of the watch, after `loop` was
                replaced. The old loop does not continue.
        """
        self._most_seconds, self._on_tick, self._on_blocked = most_seconds, on_tick, on_blocked
        self._thread: _PlayingThread | None = None
        self._abandoned: list[_PlayingThread] = []
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
        blocked_seconds, last_interrupt = 0.0, time.monotonic()
        while not self._closed.wait(TICK_SECONDS):
            thread = self._thread
            assert thread is not None
            owner = thread.owner
            now = (thread, thread.ticks, owner)
            # Time is counted in checks of this thread, not by the clock. If the whole process is suspended, no
            # episode is charged.
            blocked_seconds = blocked_seconds + TICK_SECONDS if now == seen else 0.0
            seen = now
            if owner is not None and blocked_seconds > self._most_seconds:
                self._replace(thread)
                self._on_blocked(owner)
            if time.monotonic() - last_interrupt >= _AGAIN_SECONDS:
                last_interrupt = time.monotonic()
                self._abandoned = [old for old in self._abandoned if old.interrupt()]

    def _replace(self, old: _PlayingThread) -> None:
        with self._starts:
            self._thread = _PlayingThread(self._on_tick)
        self._abandoned.append(old)
        old.give_up()
        old.interrupt()

    def close(self, farewell: Callable[[], Awaitable[None]]) -> None:
        """Run a last coroutine in the loop, then end the remaining tasks of the loop. A loop that does not react is
        abandoned."""
        self._closed.set()
        thread = self._thread
        if thread is None:
            return
        with suppress(TimeoutError, CancelledError):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), thread.loop).result(_REACT_SECONDS)
            asyncio.run_coroutine_threadsafe(self._end(farewell), thread.loop).result(_CLOSE_SECONDS)
        for old in (*self._abandoned, thread):
            old.give_up()
        thread.join(_AGAIN_SECONDS)
        for old in (*self._abandoned, thread):
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
