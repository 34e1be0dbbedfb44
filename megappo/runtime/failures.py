"""Ends all ranks when one has an error: the one way out of a run of several ranks that cannot go on.

The rank that has an error prints it first, then posts it in the store. Every rank ends within seconds with that
sentence, whatever collective it waits in. Meanwhile no rank destroys its process groups, because NCCL would wait for
the others. The error of a broken connection is not reported as the reason at once: the lost rank may post its own
first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import NoReturn

import psutil
import torch.distributed as dist

from megappo.errors import FAULT, RUN_ERROR, Interrupted, reason, verdict_of
from megappo.observe.messages import MESSAGES, tell
from megappo.observe.progress import PROGRESS
from megappo.runtime.launchers import Ranks, note_for_job, tell_torchrun
from megappo.runtime.neighbour import Neighbour, all_done, find_neighbour, has_ended, introduce, say_done
from megappo.runtime.notices import POLL_SECONDS, Notices
from megappo.runtime.waiting import pause, wait_until

_AGENT = "MEGAPPO_AGENT_PID"
_PARENT = os.getppid()
"""Parent at the start; an orphaned process has another one later."""
_FAILED = "megappo/failed"
_LEAVING = "megappo/leaving"
_POST_SECONDS = 3.0
_LAST_SECONDS = 70.0
"""Limit of the work before leaving: a checkpoint in progress has a minute."""
_LEAVE_SECONDS = 4.0
"""Time for the other ranks to say why they end, and for this rank to close what it has."""
_MEET_SECONDS = 0.25
_TURN_SECONDS = 0.1
_FLUSH_SECONDS = 1.0
_STOP_SECONDS = 20.0
_DONE_SECONDS = 5.0
_INTRODUCED_SECONDS = 2.0
"""Time for the next rank to say which process it is; all ranks have met by then."""
_RANK_0_SPEAKS_SECONDS = 2 * POLL_SECONDS
"""Time that other ranks leave rank 0, which prints an error that all ranks raise."""
_LOST_SECONDS = 5.0
"""Time that a rank which lost another waits until that one's reason is known or a launcher ends it."""
_BROKEN = re.compile(r"gloo|NCCL|[Ss]ocket|Connection (closed|reset|refused)|Broken pipe")


@dataclass(frozen=True)
class Failure:
    """Why all ranks end."""

    rank: int
    """Rank that has the error."""
    code: int
    """Exit code of every rank."""
    sentences: tuple[str, ...] = ()
    """Sentences to print; none where nothing is to be said."""
    hung_in: str = ""
    """The phase that hung; "" where none did."""
    lost: int = 0
    """Number of ranks, at least, that ended silently and are not waited for."""


class _Torchrun:
    """torchrun's agent process on this machine; nobody else would end this rank."""

    def __init__(self) -> None:
        self._pid = int(os.environ.get(_AGENT, "") or _PARENT)  # a shell may be between torchrun and the rank
        self._process: psutil.Process | None = None
        if "TORCHELASTIC_RUN_ID" in os.environ:
            with contextlib.suppress(psutil.Error):
                self._process = psutil.Process(self._pid)

    @property
    def is_gone(self) -> bool:
        """Whether torchrun started this rank and its process has ended; it normally outlives its ranks."""
        if self._process is None:
            return "TORCHELASTIC_RUN_ID" in os.environ
        return has_ended(self._process)

    @property
    def summary(self) -> str:
        """Sentence that says why this rank ends with torchrun."""
        return f"torchrun, process {self._pid} on {socket.gethostname()}, is gone, and its ranks end with it"


class Failures:
    """Failure handling of this rank, from `start` to `stop`. Any thread may call any method."""

    def __init__(self, ranks: Ranks, notices: Notices) -> None:
        self._ranks, self._notices = ranks, notices
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._before_leaving: list[Callable[[Failure], object]] = []
        self._raised: tuple[str, ...] | None = None
        """Sentences of this rank's error, before they are printed."""
        self._lock, self._is_told = threading.Lock(), False
        self._closed, self._stopped = threading.Event(), threading.Event()
        self._agent = _Torchrun()
        self._neighbour: Neighbour | None = None
        self._looks_for_neighbour, self._neighbour_is_gone = (ranks.local_world_size or 1) > 1, False
        self._old_hook = threading.excepthook

    def start(self) -> None:
        """Listen to the other ranks, and to errors in megappo's threads."""
        self._notices.listen(_FAILED, self._hear)
        self._notices.when_lost(self._store_is_lost)
        self._notices.each_turn(self._look_after_agent)
        if self._looks_for_neighbour:
            introduce(self._notices, self._rank, self._ranks.local_rank)
            wait_until(self._knows_neighbour, _INTRODUCED_SECONDS, every_seconds=_TURN_SECONDS / 10)
            self._notices.each_turn(self._look_after_neighbour)
        self._old_hook, threading.excepthook = threading.excepthook, self._thread_ended

    def stop(self) -> None:
        """Stop listening to other ranks: the run is over. Rank 0 waits some seconds for the others to say so too."""
        self._stopped.set()
        threading.excepthook = self._old_hook
        self._claim()
        self._notices.close()
        self._say_done()
        if self._rank == 0 and self._world_size > 1:  # rank 0 may hold the store, and the others must not find it lost
            with contextlib.suppress(dist.DistError):
                wait_until(
                    lambda: all_done(self._notices, self._world_size), _DONE_SECONDS, every_seconds=_TURN_SECONDS
                )

    def before_leaving(self, work: Callable[[Failure], object]) -> None:
        """Register work of bounded time that is done before this rank ends, whichever rank failed."""
        self._before_leaving.append(work)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Context that reports an error of its block before anything is closed because of it. Wraps every block with
        something to close."""
        try:
            yield
        except Interrupted as error:
            self._close_within(_STOP_SECONDS, Failure(self._rank, error.exit_code))
            raise
        except BaseException as error:
            if self._world_size == 1 and not _is_no_failure(error):  # with several ranks the others end it
                code, sentences, _ = verdict_of(error)
                self._close_within(_STOP_SECONDS, Failure(self._rank, code, sentences))
            self.tell(error)
            raise

    def done(self, close_within_seconds: float = 300.0) -> None:
        """Mark this rank as finished; the process ends with code 0 after so long, even if something cannot be
        closed."""
        self._close_within(close_within_seconds, Failure(self._rank, 0))

    def tell(self, error: BaseException) -> None:
        """Report an error of this rank and end all ranks: this one as soon as it is in `leave`, and within seconds
        anyway.

        Does nothing with one rank, where the error is raised, or where another rank's failure is already known.
        """
        if self._world_size == 1 or _is_no_failure(error):
            return
        verdict = verdict_of(error)
        sentences = verdict.sentences
        self._raised = sentences
        is_lost = _is_broken_connection(error)
        patience = _LOST_SECONDS if is_lost else _RANK_0_SPEAKS_SECONDS if self._rank else 0.0
        wait_until(lambda: self._is_told, patience, every_seconds=_TURN_SECONDS)
        if is_lost:
            sentences = (_lost_words(error),)
        tb = "".join(traceback.format_exception(error)) if verdict.is_unforeseen and not is_lost else ""
        code = verdict.code
        if is_lost:  # a foreseen error is not a fault: the function of a user may have lost a connection to a server
            code = FAULT if verdict.is_unforeseen else RUN_ERROR
        self._begin(Failure(self._rank, code, sentences, lost=int(is_lost)), tb)

    def declare(self, failure: Failure) -> None:
        """End all ranks for a reason found outside of this rank's main thread, which need not close anything."""
        self._closed.set()
        self._begin(failure)

    def _begin(self, failure: Failure, before: str = "") -> None:
        """Report a failure once and start the thread that ends the process. `before`: text printed above it on this
        rank only."""
        if not self._claim():
            return
        self._say(failure, before)
        threading.Thread(target=self._end, args=(failure,), name="leaving", daemon=True).start()

    def leave(self, error: BaseException) -> None:
        """Report an error and end the process; returns where the error is no failure or this rank is the only one."""
        if self._world_size == 1 or _is_no_failure(error):
            return
        self.tell(error)
        self._closed.set()
        threading.Event().wait()  # until the other thread ends the process

    def _close_within(self, seconds: float, failure: Failure) -> None:
        """Bound the time of closing, for example a service's client: a scheduler would wait for it, or kill the rank
        without starting it again."""

        def end_unclosed() -> None:
            if self._stopped.wait(seconds):
                return
            tell(f"what is to be closed does not end within {seconds:g} seconds, so the process ends without it")
            if failure.sentences:
                self._say(failure)
            work_within(_POST_SECONDS, self._say_done)
            os._exit(failure.code)

        threading.Thread(target=end_unclosed, name="closing", daemon=True).start()

    def _claim(self) -> bool:
        """Whether this process begins to report a failure now; False where it already has."""
        with self._lock:
            before, self._is_told = self._is_told, True
        return not before

    def _hear(self, words: str) -> None:
        if not self._claim():
            return
        given = json.loads(words)
        failure = Failure(**(given | {"sentences": tuple(given["sentences"])}))
        self._say(failure)
        self._closed.set()
        self._end(failure)

    def _say(self, failure: Failure, before: str = "") -> None:
        is_everybodys = failure.rank == 0 and self._raised == failure.sentences
        place = "" if is_everybodys or self._rank == failure.rank == 0 else f" on rank {failure.rank}"
        said = [f"error{place}: {sentence}" for sentence in failure.sentences]
        told = not said or (
            not self._agent.is_gone
            and tell_torchrun(os.environ, [f"megappo: {sentence}" for sentence in said], failure.code)
        )
        MESSAGES.tell_last("\nmegappo: ".join([] if told else said), before)

    def _end(self, failure: Failure) -> NoReturn:
        posted: list[str] = []
        self._notices.close()
        work_within(_POST_SECONDS, lambda: posted.append(self._notices.post(_FAILED, json.dumps(asdict(failure)))))
        first = json.loads(posted[0]) if posted else asdict(failure)  # the failure that was posted first
        code = first["code"]
        if code == FAULT and not first["lost"]:
            note_for_job(os.environ, "first-failed", first["rank"])
        work_within(_LAST_SECONDS, lambda: self._do_last(failure))
        begun = time.monotonic()
        # A launcher ends all ranks with the first, and rank 0 keeps the store.
        work_within(_LEAVE_SECONDS, lambda: self._meet(self._world_size - failure.lost))
        self._closed.wait(max(0.0, begun + _LEAVE_SECONDS - time.monotonic()))
        work_within(_FLUSH_SECONDS, lambda: (sys.stdout.flush(), sys.stderr.flush()))
        os._exit(code)

    def _do_last(self, failure: Failure) -> None:
        for work in self._before_leaving:
            try:
                work(failure)
            except Exception as error:  # noqa: BLE001 - whatever it was, the process ends with the failure
                tell(f"at the end of this rank: {reason(error)}")

    def _meet(self, ranks: int) -> None:
        """Wait until so many ranks have said why they end."""
        self._notices.count(_LEAVING, 1)
        wait_until(lambda: self._notices.count(_LEAVING) >= ranks, _LEAVE_SECONDS, every_seconds=_MEET_SECONDS)
        if self._rank == 0:  # rank 0 may hold the store, and the others still have to read the count
            pause(2 * _MEET_SECONDS)

    def _store_is_lost(self) -> None:
        """Handle the loss of the store: rank 0, or torchrun's agent, is gone."""
        neighbour = self._neighbour

        def neighbour_is_gone() -> bool:
            return neighbour is not None and neighbour.is_gone

        wait_until(lambda: self._is_told or neighbour_is_gone(), 2 * _LOST_SECONDS, every_seconds=_TURN_SECONDS)
        if neighbour is not None and neighbour_is_gone() and not self._agent.is_gone:
            self.declare(Failure(neighbour.rank, RUN_ERROR, (neighbour.summary,), lost=1))
            return
        words = "the store at which the ranks met is gone, and rank 0 or torchrun with it; the first to end says why"
        self.declare(Failure(self._rank, RUN_ERROR, (self._agent.summary if self._agent.is_gone else words,)))

    def _look_after_agent(self) -> None:
        if self._agent.is_gone and not self._is_told:
            self.declare(Failure(self._rank, RUN_ERROR, (self._agent.summary,)))

    def _look_after_neighbour(self) -> None:
        """Report the neighbour where it has ended. It is reported a turn later, because its own reason arrives in this
        thread too."""
        if self._neighbour_is_gone and self._neighbour is not None:
            self._looks_for_neighbour = False
            with contextlib.suppress(dist.DistError):
                if self._is_told or self._neighbour.is_done(self._notices):
                    return
            self.declare(Failure(self._neighbour.rank, RUN_ERROR, (self._neighbour.summary,), lost=1))
        elif self._looks_for_neighbour:
            known = self._knows_neighbour()
            self._neighbour_is_gone = known and self._neighbour is not None and self._neighbour.is_gone

    def _knows_neighbour(self) -> bool:
        with contextlib.suppress(dist.DistError):
            place = (self._ranks.local_rank, self._ranks.local_world_size or 1)
            self._neighbour = self._neighbour or find_neighbour(self._notices, *place)
        return self._neighbour is not None

    def _say_done(self) -> None:
        with contextlib.suppress(dist.DistError):  # rank 0 may have ended, and the store with it
            say_done(self._notices, self._rank)

    def _thread_ended(self, given: threading.ExceptHookArgs) -> None:
        error = given.exc_value
        if error is None or self._world_size == 1 or not _is_ours(given.exc_traceback) or isinstance(error, SystemExit):
            self._old_hook(given)
            return
        self.tell(error)


def _is_no_failure(error: BaseException) -> bool:
    """Whether an error is a normal end: all ranks of a run that was asked to stop end by themselves."""
    ends_well = isinstance(error, SystemExit) and not error.code
    return ends_well or isinstance(error, Interrupted | GeneratorExit)


def _is_broken_connection(error: BaseException) -> bool:
    """Whether an error says only that another rank, or the store, does not answer."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, dist.DistError):
            return True
        if type(chain) is RuntimeError and _BROKEN.search(str(chain)):
            return True
        chain = chain.__cause__
    return False


def _lost_words(error: BaseException) -> str:
    stage = PROGRESS.text()
    return (
        f"another rank ended without a word, or cannot be reached any more{f', in {stage}' if stage else ''}; look for "
        f"the one that ended first, such as by a lack of memory (this rank's connection: {reason(error)})"
    )


def _is_ours(found: TracebackType | None) -> bool:
    """Whether a thread's traceback begins in megappo."""
    while found is not None and found.tb_frame.f_globals.get("__name__") == "threading":
        found = found.tb_next
    return found is not None and str(found.tb_frame.f_globals.get("__name__")).startswith("megappo.")


def work_within(seconds: float, work: Callable[[], object]) -> None:
    """Run work that may fail or never return, for at most so many seconds."""

    def quietly() -> None:
        with contextlib.suppress(dist.DistError, OSError, ValueError):
            work()

    working = threading.Thread(target=quietly, daemon=True)
    working.start()
    working.join(seconds)
