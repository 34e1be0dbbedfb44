"""Authenticated messages between a pool and a reward worker.

A reward function can write to any file descriptor of its process. Requests use a socket that a worker can only read.
Answers use a socket that preserves message boundaries. An answer is JSON after a key that the pool generated.
Therefore, data of a function is recognized, does not shift other messages, and is never unpickled.
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
"""Maximum size of a message. Longer messages would be truncated. The text of a tool has at most 16,000 characters
(`output_characters`), and JSON encodes a character in at most twelve bytes."""


class ForeignMessageError(Exception):
    """Error for data on the socket of a worker that is not an answer of the worker."""


class PoolEnd:
    """End of the trainer for one worker."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        theirs.shutdown(socket.SHUT_WR)
        # A stopped process must not block a send forever. The timeout ends the send with OSError.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _TRANSFER_SECONDS, 0))
        # Each owner has a separate descriptor. A second close could close an unrelated, reused descriptor.
        self._hang_up, self._requests = ours, Connection(os.dup(ours.fileno()), readable=False)
        self.answers, their_answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        """Socket that becomes readable when an answer arrives or the worker ends."""
        # Linux rejects messages that exceed this buffer. The default is 212,992 bytes.
        their_answers.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST_MESSAGE_BYTES)
        self._theirs = (theirs, their_answers)
        self._key = secrets.token_bytes(_KEY_BYTES)

    @property
    def their_descriptors(self) -> tuple[int, int]:
        """File descriptors that the worker inherits, for `WorkerEnd`."""
        return self._theirs[0].fileno(), self._theirs[1].fileno()

    def started(self, first: Any) -> None:
        """Close this side's copies of the worker's descriptors, then send the key and the first message to the worker.

        The caller must call this method as soon as the worker process runs.
        """
        for end in self._theirs:
            end.close()
        self.send((self._key, first))

    def send(self, requests: Any) -> None:
        """Send requests to the worker. Raises OSError if the worker has ended or does not read."""
        self._requests.send(requests)

    def receive(self) -> list[Any] | None:
        """Return the next answer, or None if no answer has arrived.

        Raises EOFError if the worker has ended, and ForeignMessageError for a message without the key.
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
        """Close the channel. The worker receives the end of its requests, even if a forked process of the trainer
        still has the socket."""
        self._hang_up.shutdown(socket.SHUT_RDWR)
        self._hang_up.close()
        self._requests.close()
        self.answers.close()


class WorkerEnd:
    """End of the process that calls the reward function."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = Connection(requests, writable=False)
        self._answers = socket.socket(fileno=answers)
        self._key, self.first = self._requests.recv()
        """`first` is the message that came with the key."""
        # A process that the function forks must not keep the sockets open. Otherwise the pool misses the worker's end.
        os.register_at_fork(after_in_child=self._close)

    def _close(self) -> None:
        for end in (self._requests, self._answers):
            with suppress(OSError):  # the function may have closed the socket
                end.close()

    def receive(self) -> Any:
        """Return the next requests. Raises EOFError if the pool has closed the channel."""
        return self._requests.recv()

    def send(self, answer: Sequence[float | str | None]) -> None:
        """Send an answer of numbers, texts and None. Raises ConnectionError if the pool has closed the channel."""
        self._answers.send(self._key + json.dumps(answer).encode())
