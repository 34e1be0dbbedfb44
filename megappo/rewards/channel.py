"""Messages between a pool and a reward worker, which nothing else can be mistaken for.

A reward function may write into any file descriptor of its process. Requests go through a socket that a worker can only
read. Answers go through a socket that preserves message boundaries, as JSON behind a key that the pool made: whatever a
function writes there is recognised, does not shift other messages, and is never unpickled.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

_TRANSFER_SECONDS = 10
_KEY_BYTES = 16
_LARGEST_MESSAGE_BYTES = 2**18
"""A longer message would be truncated. A tool's text has at most 16,000 characters (`output_characters`), of which JSON
makes up to twelve bytes each."""


class ForeignMessageError(Exception):
    """The socket of a worker held something other than the worker's answer."""


class PoolEnd:
    """The trainer's side of one worker."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        theirs.shutdown(socket.SHUT_WR)
        # A stopped process must not block a send for ever: it ends with OSError after a while.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _TRANSFER_SECONDS, 0))
        # Each owner closes a descriptor of its own: one that is closed twice may be somebody else's by then.
        self._hang_up, self._requests = ours, Connection(os.dup(ours.fileno()), readable=False)
        self.answers, their_answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        """Socket that is readable when an answer waits, or when the worker has ended."""
        # Linux refuses a message that is longer than this buffer, whose default is 212,992 bytes.
        their_answers.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST_MESSAGE_BYTES)
        self._theirs = (theirs, their_answers)
        self._key = secrets.token_bytes(_KEY_BYTES)

    @property
    def their_descriptors(self) -> tuple[int, int]:
        """File descriptors that the worker inherits, for `WorkerEnd`."""
        return self._theirs[0].fileno(), self._theirs[1].fileno()

    def started(self, first: Any) -> None:
        """Call this when the worker process runs: closes this side's copies of its descriptors, and sends it the key
        and its first message."""
        for end in self._theirs:
            end.close()
        self.send((self._key, first))

    def send(self, requests: Any) -> None:
        """Send requests to the worker. Raises OSError where it has ended or does not read."""
        self._requests.send(requests)

    def receive(self) -> list[Any] | None:
        """The next answer, None where there is none yet.

        Raises EOFError where the worker has ended, ForeignMessageError for what it did not sign.
        """
        try:
            message = self.answers.recv(_LARGEST_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        if not message:
            raise EOFError
        if not message.startswith(self._key):
            raise ForeignMessageError
        answer: list[Any] = json.loads(message[_KEY_BYTES:])
        return answer

    def close(self) -> None:
        """Close the channel; the worker sees the end of its requests, even where a forked process of the trainer still
        holds the socket."""
        self._hang_up.shutdown(socket.SHUT_RDWR)
        self._hang_up.close()
        self._requests.close()
        self.answers.close()


class WorkerEnd:
    """The side of the process that calls the function."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = Connection(requests, writable=False)
        self._answers = socket.socket(fileno=answers)
        self._key, self.first = self._requests.recv()
        """`first` is what came with the key."""
        # A process that the function forks must not keep them open: the pool would not see that the worker has ended.
        os.register_at_fork(after_in_child=self._close)

    def _close(self) -> None:
        for end in (self._requests, self._answers):
            with suppress(OSError):  # the function may have closed it
                end.close()

    def receive(self) -> Any:
        """The next requests. Raises EOFError where the pool is gone."""
        return self._requests.recv()

    def send(self, answer: Sequence[float | str | None]) -> None:
        """Send an answer of numbers, texts and None. Raises ConnectionError where the pool is gone."""
        self._answers.send(self._key + json.dumps(answer).encode())
