"""Messages between ranks outside of collectives, through the store at which they met."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

POLL_SECONDS = 0.5


class Notices:
    """Words and counts in the store. They use a connection of their own, as the process group holds the first one while
    it waits. Any thread may call any method; each raises DistError once the store is gone."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._heard: dict[str, Callable[[str], None]] = {}
        self._each_turn: list[Callable[[], None]] = []
        self._lost: Callable[[], None] = _nothing
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def post(self, name: str, words: str) -> str:
        """Post words for all ranks, unless the name already has some; returns those that are there."""
        return str(self._store.compare_set(name, "", words).decode())

    def text(self, name: str) -> str:
        """Text posted under a name, "" where there are none."""
        return str(self._store.get(name).decode()) if self._store.check([name]) else ""

    def count(self, name: str, more: int = 0) -> int:
        """Add `more` to a count that all ranks share, and return it."""
        return int(self._store.add(name, more))

    def listen(self, name: str, heard: Callable[[str], None]) -> None:
        """Call `heard` once, in a thread, with what a rank posts under a name or has already posted."""
        with self._lock:
            self._heard[name] = heard
        self._begin()

    def each_turn(self, work: Callable[[], None]) -> None:
        """Call `work` in that thread at every poll."""
        with self._lock:
            self._each_turn.append(work)
        self._begin()

    def when_lost(self, lost: Callable[[], None]) -> None:
        """Call `lost` in that thread when the store is gone."""
        self._lost = lost

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="notices", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            with self._lock:
                turns, awaited = list(self._each_turn), list(self._heard)
            for work in turns:
                work()
            try:
                come = {name: self._store.get(name).decode() for name in awaited if self._store.check([name])}
            except dist.DistError:
                if not self._closed.is_set():
                    self._lost()
                return
            for name, words in come.items():
                with self._lock:
                    heard = self._heard.pop(name)
                heard(words)


def _nothing() -> None:
    """Default of `when_lost`."""
