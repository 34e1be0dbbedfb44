"""A reward worker: `python -m megappo.rewards.worker_main REQUESTS ANSWERS`, started by `workers.RewardPool`.

It is two processes. The pool starts the supervisor, which forks the worker and adopts its orphans. When the worker
ends, the pool hangs up or the trainer is gone, the supervisor ends all descendants of the worker and then itself.

The worker receives a RewardChoice once and answers ("ready", its process id) or ("broken", reason). Then it receives
lists of pickled requests, the fields of `workers.RewardRequest` by name, and answers each of them in order with (score,
None), (score, note) or (None, reason).

It imports nothing heavy: a killed worker is replaced in the time that its imports take.
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

from megappo.observe.streams import adapt_streams
from megappo.plugins import failure_words
from megappo.rewards.channel import WorkerEnd
from megappo.rewards.descendants import adopt_orphans, die_with_parent, end_descendants, reap
from megappo.rewards.http import Unscored
from megappo.rewards.judge import Noted
from megappo.rewards.numbers import as_float, score_problem
from megappo.rewards.registry import OF_EACH, RewardCallable, RewardChoice, argument_names, resolve

_REASON_CHARACTERS = 500
_BROKEN_CHARACTERS = 4000

Answer = tuple[float | None, str | None]


def _number(value: Any) -> Answer:
    """A score that fits float32, or the reason why `value` is none; an error in the value's own methods is a reason
    too."""
    try:
        return _read(value)
    except BaseException as error:  # noqa: BLE001 - of a user's object: signals end no worker
        return None, f"returned what is no number: {failure_words(error, _REASON_CHARACTERS)}"[:_REASON_CHARACTERS]


def _read(value: Any) -> Answer:
    if isinstance(value, Unscored):
        return None, value[:_REASON_CHARACTERS]
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None, f"returned {value!r}, must be a number"[:_REASON_CHARACTERS]
    number = as_float(value)
    if problem := score_problem(number):
        return None, f"returned {problem}"
    return number, value.note[:_REASON_CHARACTERS] if isinstance(value, Noted) else None


def _answers(choice: RewardChoice, function: RewardCallable, names: Sequence[str], asked: list[bytes]) -> list[Answer]:
    """Answers of one call of the function: for one sample, or with a batch function for all of them, which fail
    together."""
    try:
        samples = [pickle.loads(pickled) for pickled in asked]
        if not choice.batch:
            found = function(**{name: samples[0][name] for name in names}, **choice.options)
            if issubclass(type(found), list | tuple):  # an object may give another __class__
                return [(None, "returned a list, must be a number; set reward.batch: true for a function of lists")]
            return [_number(found)]
        columns = {name: [sample[OF_EACH.get(name, name)] for sample in samples] for name in names}
        return _numbers(function(**columns, **choice.options), len(asked))
    except BaseException as error:  # noqa: BLE001 - what a user's function raises is a failed sample
        return [(None, failure_words(error, _REASON_CHARACTERS))] * len(asked)


def _numbers(found: Any, count: int) -> list[Answer]:
    """The scores of a batch function's result, one for each sample."""
    # A list of them would hold characters, bytes or keys, or be in any order.
    if isinstance(found, str | bytes | bytearray | memoryview | Mapping | Set):
        return [(None, f"returned a {type(found).__name__}, must be a list of numbers")] * count
    if not isinstance(found, Iterable):
        problem = f"returned {found!r}, must be a list of numbers; set reward.batch: false for a function of one sample"
        return [(None, problem[:_REASON_CHARACTERS])] * count
    values = list(found)
    if len(values) != count:
        return [(None, f"returned {len(values)} scores for {count} samples")] * count
    return [_number(value) for value in values]


def _serve(pool: WorkerEnd) -> None:
    """Answer until the pool is gone, which raises EOFError or ConnectionError."""
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
        for asked in [pickled] if choice.batch else [[request] for request in pickled]:
            for answer in _answers(choice, function, names, asked):
                if os.getpid() != process:  # the function forked: a second answer would become the next sample's score
                    os._exit(0)
                pool.send(answer)


def _leave_stopping_to_the_pool() -> None:
    """Ignore signals that stop a job. Schedulers and terminals send these signals to all processes of a job. A worker
    that exits immediately would fail its samples. Processes that the function starts can be stopped as usual."""
    stopping = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in stopping:
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in stopping] and None)


def _work(requests: int, answers: int, supervisor: int, serve: Callable[[WorkerEnd], None]) -> None:
    """Run the worker, in a session of its own: a function may signal its whole process group."""
    die_with_parent(signal.SIGKILL)  # a function that hangs would never notice that the pool is gone
    if os.getppid() != supervisor:
        return
    os.setsid()
    _leave_stopping_to_the_pool()
    for descriptor in (requests, answers):
        os.set_inheritable(descriptor, False)  # a function's own children would keep the sockets open
    try:
        serve(WorkerEnd(requests, answers))
    except (EOFError, ConnectionError):
        return


def _supervise(worker: int, requests: int, trainer: int) -> None:
    """Wait until the worker, the pool or the trainer is gone, then end all descendants of the worker.

    The pool hangs up by shutting down its end of `requests`. That end of a killed trainer can stay open in a process
    that the trainer forked; then the signal of the parent's death (`die_with_parent`) tells.
    """
    awake, bell = socket.socketpair()
    for end in (awake, bell):
        end.setblocking(False)
    signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
    # These signals only wake the loop below, which looks at worker and trainer itself.
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
    """Have a worker serve until the pool hangs up."""
    adapt_streams()
    requests, answers = int(sys.argv[1]), int(sys.argv[2])
    trainer, supervisor = os.getppid(), os.getpid()
    os.dup2(2, 1)  # what a function prints must not end up in the parent's output
    adopt_orphans()
    worker = os.fork()
    if worker == 0:
        _work(requests, answers, supervisor, serve)
        return
    os.close(answers)  # its end must be seen when the worker ends
    _supervise(worker, requests, trainer)


if __name__ == "__main__":
    main()
