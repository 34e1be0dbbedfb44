"""Messages between ranks outside of collectives, through the common store of the ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

POLL_SECONDS = 0.5


class Notices:
    """Texts and counts in the store. All methods are thread-safe, and raise DistError if the store is gone.

    The notices use a separate connection, because the process group blocks the first connection while it waits.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._callbacks: dict[str, Callable[[str], None]] = {}
        self._each_turn: list[Callable[[], None]] = []
        self._lost: Callable[[], None] = _nothing
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def post(self, name: str, text: str) -> str:
        """Post a text for all ranks, unless the name already has a text. Returns the text of the name."""
        return str(self._store.compare_set(name, "", text).decode())

    def text(self, name: str) -> str:
        """Return the text of a name, "" if no rank has posted one."""
        return str(self._store.get(name).decode()) if self._store.check([name]) else ""

    def count(self, name: str, more: int = 0) -> int:
        """Add `more` to a count that all ranks share, and return the count."""
        return int(self._store.add(name, more))

    def listen(self, name: str, callback: Callable[[str], None]) -> None:
        """Call `callback` once, in a thread, with the text of a name. The text may already be posted."""
        with self._lock:
            self._callbacks[name] = callback
        self._begin()

    def each_turn(self, work: Callable[[], None]) -> None:
        """Call `work` in the same thread at every poll."""
        with self._lock:
            self._each_turn.append(work)
        self._begin()

    def when_lost(self, lost: Callable[[], None]) -> None:
        """Call `lost` in the same thread when the store is gone."""
        self._lost = lost

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="notices", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            with self._lock:
                turns, awaited = list(self._each_turn), list(self._callbacks)
            for work in turns:
                work()
            try:
                arrived = {name: self._store.get(name).decode() for name in awaited if self._store.check([name])}
            except dist.DistError:
                if not self._closed.is_set():
                    self._lost()
                return
            for name, text in arrived.items():
                with self._lock:
                    callback = self._callbacks.pop(name)
                callback(text)


def _nothing() -> None:
    """Do nothing; the default of `when_lost`."""
