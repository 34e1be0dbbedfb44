"""Reward worker: `python -m megappo.rewards.processes.worker_main REQUESTS ANSWERS`, started by `workers.RewardPool`.

A reward worker has two processes. The pool starts the supervisor. The supervisor forks the worker and adopts its
orphans. When the worker ends, the pool closes the channel or the trainer has ended, the supervisor ends all
descendants of the worker and then itself.

The worker first receives a RewardChoice and answers ("ready", its process id) or ("broken", reason). Then the worker
receives lists of pickled requests, which are the fields of `workers.RewardRequest` by name. The worker answers each
request in order with (score, None), (score, note) or (None, reason).

The module imports nothing heavy, because the imports determine the time to replace a killed worker.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from megappo.observe.terminal.streams import adapt_streams
from megappo.plugins import failure_text
from megappo.rewards.http import Unscored
from megappo.rewards.judge import Noted
from megappo.rewards.numbers import as_float, score_problem
from megappo.rewards.processes.channel import WorkerEnd
from megappo.rewards.processes.descendants import adopt_orphans, die_with_parent, end_descendants, reap
from megappo.rewards.registry import OF_EACH, RewardCallable, RewardChoice, argument_names, resolve

_REASON_CHARACTERS = 500
_BROKEN_CHARACTERS = 4000

Answer = tuple[float | None, str | None]


def _number(value: Any) -> Answer:
    """Return a score that fits float32, or a reason. An error in the methods of `value` is a reason too."""
    try:
        return _read(value)
    except BaseException as error:  # noqa: BLE001 - any error of a user's object fails only its sample
        return None, f"returned no valid number: {failure_text(error, _REASON_CHARACTERS)}"[:_REASON_CHARACTERS]


def _read(value: Any) -> Answer:
    if isinstance(value, Unscored):
        return None, value[:_REASON_CHARACTERS]
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None, f"returned {value!r}, must be a number"[:_REASON_CHARACTERS]
    number = as_float(value)
    if problem := score_problem(number):
        return None, f"returned {problem}"
    return number, value.note[:_REASON_CHARACTERS] if isinstance(value, Noted) else None


def _answers(
    choice: RewardChoice, function: RewardCallable, names: Sequence[str], requests: list[bytes]
) -> list[Answer]:
    """Return the answers of one call of the function: for one sample, or for all samples of a batch function.

    All samples of a batch function fail together.
    """
    try:
        samples = [pickle.loads(pickled) for pickled in requests]
        if not choice.batch:
            result = function(**{name: samples[0][name] for name in names}, **choice.options)
            if issubclass(type(result), list | tuple):  # `type` ignores a custom __class__
                return [(None, "returned a list, must be a number; set reward.batch: true for a function of lists")]
            return [_number(result)]
        columns = {name: [sample[OF_EACH.get(name, name)] for sample in samples] for name in names}
        return _numbers(function(**columns, **choice.options), len(requests))
    except BaseException as error:  # noqa: BLE001 - any error of a user's function fails only its samples
        return [(None, failure_text(error, _REASON_CHARACTERS))] * len(requests)


def _numbers(result: Any, count: int) -> list[Answer]:
    """Return the scores of a batch function's result, one for each sample."""
    # Iteration over these types yields characters, bytes or keys, or has no defined order.
    if isinstance(result, str | bytes | bytearray | memoryview | Mapping | Set):
        return [(None, f"returned a {type(result).__name__}, must be a list of numbers")] * count
    if not isinstance(result, Iterable):
        problem = (
            f"returned {result!r}, must be a list of numbers; set reward.batch: false for a function of one sample"
        )
        return [(None, problem[:_REASON_CHARACTERS])] * count
    values = list(result)
    if len(values) != count:
        return [(None, f"returned {len(values)} scores for {count} samples")] * count
    return [_number(value) for value in values]


def _serve(pool: WorkerEnd) -> None:
    """Answer requests until the pool closes the channel, which raises EOFError or ConnectionError."""
    choice: RewardChoice = pool.first
    process = os.getpid()
    try:
        function = resolve(choice)
    except ValueError as error:
        pool.send(("broken", str(error)[:_BROKEN_CHARACTERS]))
        return
    pool.send(("ready", process))
    names = argument_names(function, batch=choice.batch)
    while True:
        pickled: list[bytes] = pool.receive()
        for requests in [pickled] if choice.batch else [[request] for request in pickled]:
            for answer in _answers(choice, function, names, requests):
                if os.getpid() != process:  # a forked process must not send an answer for the next sample
                    os._exit(0)
                pool.send(answer)


def _ignore_stop_signals() -> None:
    """Ignore signals that stop a job. Schedulers and terminals send these signals to all processes of a job. A worker
    that exits immediately would fail its samples. Processes that the function starts can be stopped as usual."""
    stopping = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in stopping:
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in stopping] and None)


def _work(requests: int, answers: int, supervisor: int, serve: Callable[[WorkerEnd], None]) -> None:
    """Run the worker in a separate session, because a function can send signals to its whole process group."""
    die_with_parent(signal.SIGKILL)  # a hanging function would not notice the end of the pool
    if os.getppid() != supervisor:
        return
    os.setsid()
    _ignore_stop_signals()
    for descriptor in (requests, answers):
        os.set_inheritable(descriptor, False)  # children of the function must not keep the sockets open
    try:
        serve(WorkerEnd(requests, answers))
    except (EOFError, ConnectionError):
        return


def _supervise(worker: int, requests: int, trainer: int) -> None:
    """Wait until the worker, the pool or the trainer has ended, then end all descendants of the worker.

    The pool shuts down its end of `requests` to close the channel. A process that a killed trainer forked can keep
    this end open. In this case the signal of the parent's death (`die_with_parent`) reports the end of the trainer.
    """
    awake, bell = socket.socketpair()
    for end in (awake, bell):
        end.setblocking(False)
    signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
    # These signals only wake the following loop, which checks the worker and the trainer.
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    die_with_parent(signal.SIGTERM)
    events = select.poll()
    events.register(requests, select.POLLRDHUP)
    events.register(awake, select.POLLIN)
    hung_up = False
    while not hung_up and os.getppid() == trainer and _runs(worker):
        ready = dict(events.poll())
        hung_up = requests in ready
        if awake.fileno() in ready:
            awake.recv(4096)
    end_descendants()


def _runs(worker: int) -> bool:
    ended = reap()
    return ended is not None and worker not in ended


def main(serve: Callable[[WorkerEnd], None] = _serve) -> None:
    """Run a worker until the pool closes the channel."""
    adapt_streams()
    requests, answers = int(sys.argv[1]), int(sys.argv[2])
    trainer, supervisor = os.getppid(), os.getpid()
    os.dup2(2, 1)  # output of a function must not appear in the output of the parent
    adopt_orphans()
    worker = os.fork()
    if worker == 0:
        _work(requests, answers, supervisor, serve)
        return
    os.close(answers)  # the pool must notice the end of the worker
    _supervise(worker, requests, trainer)


if __name__ == "__main__":
    main()
