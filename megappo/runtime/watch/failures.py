"""Exit of all ranks after an error of one rank. Every error in a run with several ranks uses this module.

The rank with the error first prints the error, and then posts it in the store. Every rank ends within seconds with this
error, even if the rank waits in a collective. No rank destroys its process groups in the meantime, because NCCL would
wait for the other ranks. A rank does not report a broken connection at once, because the lost rank may still post the
cause.
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
from megappo.observe.terminal.messages import MESSAGES, show_message
from megappo.observe.terminal.progress import PROGRESS
from megappo.runtime.launchers import Ranks, note_for_job, write_torchrun_error
from megappo.runtime.waiting import pause, wait_until
from megappo.runtime.watch.notices import POLL_SECONDS, Notices
from megappo.runtime.watch.rank_peer import NextRank, all_done, announce_done, find_next_rank, has_ended, introduce

_AGENT = "MEGAPPO_AGENT_PID"
_PARENT = os.getppid()
"""Parent process at the start. An orphaned process has a different parent later."""
_FAILED = "megappo/failed"
_LEAVING = "megappo/leaving"
_POST_SECONDS = 3.0
_LAST_SECONDS = 70.0
"""Limit of the work before leaving. A checkpoint in progress takes up to a minute."""
_LEAVE_SECONDS = 4.0
"""Time for the other ranks to report their end, and for this rank to close its resources."""
_MEET_SECONDS = 0.25
_TURN_SECONDS = 0.1
_FLUSH_SECONDS = 1.0
_STOP_SECONDS = 20.0
_DONE_SECONDS = 5.0
_INTRODUCED_SECONDS = 2.0
"""Time for the next rank to post its process number. All ranks have connected before."""
_RANK_0_SPEAKS_SECONDS = 2 * POLL_SECONDS
"""Time that other ranks wait for rank 0, which prints an error that all ranks raise."""
_LOST_SECONDS = 5.0
"""Time that a rank waits after it lost another rank, until the cause is known or a launcher ends this rank."""
_BROKEN = re.compile(r"gloo|NCCL|[Ss]ocket|Connection (closed|reset|refused)|Broken pipe")


@dataclass(frozen=True)
class Failure:
    """Reason of the end of all ranks."""

    rank: int
    """Rank with the error."""
    code: int
    """Exit code of every rank."""
    sentences: tuple[str, ...] = ()
    """Sentences to print; empty if nothing is printed."""
    hung_in: str = ""
    """Phase that hung; "" if no phase hung."""
    lost: int = 0
    """Minimum number of ranks that ended without a message. The other ranks do not wait for them."""


class _Torchrun:
    """Agent process of torchrun on this machine. If the agent is gone, no other process would end this rank."""

    def __init__(self) -> None:
        self._pid = int(os.environ.get(_AGENT, "") or _PARENT)  # a shell may be between torchrun and the rank
        self._process: psutil.Process | None = None
        if "TORCHELASTIC_RUN_ID" in os.environ:
            with contextlib.suppress(psutil.Error):
                self._process = psutil.Process(self._pid)

    @property
    def is_gone(self) -> bool:
        """Whether torchrun started this rank and its process has ended. Normally torchrun outlives its ranks."""
        if self._process is None:
            return "TORCHELASTIC_RUN_ID" in os.environ
        return has_ended(self._process)

    @property
    def summary(self) -> str:
        """Error sentence for an end together with torchrun."""
        return f"torchrun, process {self._pid} on {socket.gethostname()}, is gone, and its ranks end with it"


class Failures:
    """Failure handling of this rank between `start` and `stop`. All methods are thread-safe."""

    def __init__(self, ranks: Ranks, notices: Notices) -> None:
        self._ranks, self._notices = ranks, notices
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._before_leaving: list[Callable[[Failure], object]] = []
        self._raised: tuple[str, ...] | None = None
        """Sentences of the error of this rank, set before they are printed."""
        self._lock, self._is_reported = threading.Lock(), False
        self._closed, self._stopped = threading.Event(), threading.Event()
        self._agent = _Torchrun()
        self._next_rank: NextRank | None = None
        self._watches_next_rank, self._next_rank_is_gone = (ranks.local_world_size or 1) > 1, False
        self._old_hook = threading.excepthook

    def start(self) -> None:
        """Start to receive failures of other ranks, and to report errors in threads of megappo."""
        self._notices.listen(_FAILED, self._receive)
        self._notices.when_lost(self._store_is_lost)
        self._notices.each_turn(self._check_agent)
        if self._watches_next_rank:
            introduce(self._notices, self._rank, self._ranks.local_rank)
            wait_until(self._find_next_rank, _INTRODUCED_SECONDS, every_seconds=_TURN_SECONDS / 10)
            self._notices.each_turn(self._check_next_rank)
        self._old_hook, threading.excepthook = threading.excepthook, self._thread_ended

    def stop(self) -> None:
        """Stop failure handling at the end of the run. Rank 0 waits some seconds until the other ranks are done."""
        self._stopped.set()
        threading.excepthook = self._old_hook
        self._claim()
        self._notices.close()
        self._announce_done()
        if self._rank == 0 and self._world_size > 1:  # rank 0 may serve the store, which the other ranks still need
            with contextlib.suppress(dist.DistError):
                wait_until(
                    lambda: all_done(self._notices, self._world_size), _DONE_SECONDS, every_seconds=_TURN_SECONDS
                )

    def before_leaving(self, work: Callable[[Failure], object]) -> None:
        """Register work of bounded time, which this rank does before it ends after a failure of any rank."""
        self._before_leaving.append(work)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error of the block before resources are closed. Wraps every block with resources to close."""
        try:
            yield
        except Interrupted as error:
            self._close_within(_STOP_SECONDS, Failure(self._rank, error.exit_code))
            raise
        except BaseException as error:
            if self._world_size == 1 and not _is_no_failure(
                error
            ):  # with several ranks, `show_message` ends the process
                code, sentences, _ = verdict_of(error)
                self._close_within(_STOP_SECONDS, Failure(self._rank, code, sentences))
            self.report(error)
            raise

    def done(self, close_within_seconds: float = 300.0) -> None:
        """Mark this rank as finished. The process ends with code 0 after `close_within_seconds` seconds, even if a
        resource cannot be closed."""
        self._close_within(close_within_seconds, Failure(self._rank, 0))

    def report(self, error: BaseException) -> None:
        """Report an error of this rank and end all ranks. This rank ends as soon as it calls `leave`, or after some
        seconds.

        With one rank the function returns, and the caller raises the error. The function also does nothing if the
        failure of another rank is already known.
        """
        if self._world_size == 1 or _is_no_failure(error):
            return
        verdict = verdict_of(error)
        sentences = verdict.sentences
        self._raised = sentences
        is_lost = _is_broken_connection(error)
        patience = _LOST_SECONDS if is_lost else _RANK_0_SPEAKS_SECONDS if self._rank else 0.0
        wait_until(lambda: self._is_reported, patience, every_seconds=_TURN_SECONDS)
        if is_lost:
            sentences = (_lost_sentence(error),)
        tb = "".join(traceback.format_exception(error)) if verdict.is_unforeseen and not is_lost else ""
        code = verdict.code
        if is_lost:  # a foreseen error is no fault: for example, a user's function lost the connection to a server
            code = FAULT if verdict.is_unforeseen else RUN_ERROR
        self._begin(Failure(self._rank, code, sentences, lost=int(is_lost)), tb)

    def declare(self, failure: Failure) -> None:
        """End all ranks for a reason outside of the main thread of this rank. The main thread closes no resources."""
        self._closed.set()
        self._begin(failure)

    def _begin(self, failure: Failure, before: str = "") -> None:
        """Report a failure once and start the thread that ends the process. `before` is printed above the failure, on
        this rank only."""
        if not self._claim():
            return
        self._print(failure, before)
        threading.Thread(target=self._end, args=(failure,), name="leaving", daemon=True).start()

    def leave(self, error: BaseException) -> None:
        """Report an error and end the process. Returns if the error is no failure, or if there is only one rank."""
        if self._world_size == 1 or _is_no_failure(error):
            return
        self.report(error)
        self._closed.set()
        threading.Event().wait()  # until the other thread ends the process

    def _close_within(self, seconds: float, failure: Failure) -> None:
        """Limit the time to close resources, such as the client of a service. Without a limit, a scheduler would wait
        for the process, or kill the rank without a restart."""

        def end_unclosed() -> None:
            if self._stopped.wait(seconds):
                return
            show_message(
                f"a resource was not closed within {seconds:g} seconds, so the process ends without closing it"
            )
            if failure.sentences:
                self._print(failure)
            work_within(_POST_SECONDS, self._announce_done)
            os._exit(failure.code)

        threading.Thread(target=end_unclosed, name="closing", daemon=True).start()

    def _claim(self) -> bool:
        """Return True if the caller may report a failure, False if this process has already reported one."""
        with self._lock:
            before, self._is_reported = self._is_reported, True
        return not before

    def _receive(self, text: str) -> None:
        if not self._claim():
            return
        fields = json.loads(text)
        failure = Failure(**(fields | {"sentences": tuple(fields["sentences"])}))
        self._print(failure)
        self._closed.set()
        self._end(failure)

    def _print(self, failure: Failure, before: str = "") -> None:
        is_everybodys = failure.rank == 0 and self._raised == failure.sentences
        place = "" if is_everybodys or self._rank == failure.rank == 0 else f" on rank {failure.rank}"
        lines = [f"error{place}: {sentence}" for sentence in failure.sentences]
        needs_no_print = not lines or (
            not self._agent.is_gone
            and write_torchrun_error(os.environ, [f"megappo: {sentence}" for sentence in lines], failure.code)
        )
        MESSAGES.show_last("\nmegappo: ".join([] if needs_no_print else lines), before)

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
        # A launcher ends all ranks with the first one, and rank 0 serves the store.
        work_within(_LEAVE_SECONDS, lambda: self._meet(self._world_size - failure.lost))
        self._closed.wait(max(0.0, begun + _LEAVE_SECONDS - time.monotonic()))
        work_within(_FLUSH_SECONDS, lambda: (sys.stdout.flush(), sys.stderr.flush()))
        os._exit(code)

    def _do_last(self, failure: Failure) -> None:
        for work in self._before_leaving:
            try:
                work(failure)
            except Exception as error:  # noqa: BLE001 - the process ends with the failure after any exception
                show_message(f"at the end of this rank: {reason(error)}")

    def _meet(self, ranks: int) -> None:
        """Wait until `ranks` ranks have reported their end."""
        self._notices.count(_LEAVING, 1)
        wait_until(lambda: self._notices.count(_LEAVING) >= ranks, _LEAVE_SECONDS, every_seconds=_MEET_SECONDS)
        if self._rank == 0:  # rank 0 may serve the store, and the other ranks still have to read the count
            pause(2 * _MEET_SECONDS)

    def _store_is_lost(self) -> None:
        """Handle the loss of the store, after the end of rank 0 or of torchrun's agent."""
        next_rank = self._next_rank

        def next_rank_is_gone() -> bool:
            return next_rank is not None and next_rank.is_gone

        wait_until(lambda: self._is_reported or next_rank_is_gone(), 2 * _LOST_SECONDS, every_seconds=_TURN_SECONDS)
        if next_rank is not None and next_rank_is_gone() and not self._agent.is_gone:
            self.declare(Failure(next_rank.rank, RUN_ERROR, (next_rank.summary,), lost=1))
            return
        sentence = "the store of the ranks is gone, with rank 0 or torchrun; see the output of the first process to end"
        self.declare(Failure(self._rank, RUN_ERROR, (self._agent.summary if self._agent.is_gone else sentence,)))

    def _check_agent(self) -> None:
        if self._agent.is_gone and not self._is_reported:
            self.declare(Failure(self._rank, RUN_ERROR, (self._agent.summary,)))

    def _check_next_rank(self) -> None:
        """Report the next rank if it has ended. The report waits for one turn, because the message of the next rank
        arrives in the same thread."""
        if self._next_rank_is_gone and self._next_rank is not None:
            self._watches_next_rank = False
            with contextlib.suppress(dist.DistError):
                if self._is_reported or self._next_rank.is_done(self._notices):
                    return
            self.declare(Failure(self._next_rank.rank, RUN_ERROR, (self._next_rank.summary,), lost=1))
        elif self._watches_next_rank:
            known = self._find_next_rank()
            self._next_rank_is_gone = known and self._next_rank is not None and self._next_rank.is_gone

    def _find_next_rank(self) -> bool:
        with contextlib.suppress(dist.DistError):
            local_place = (self._ranks.local_rank, self._ranks.local_world_size or 1)
            self._next_rank = self._next_rank or find_next_rank(self._notices, *local_place)
        return self._next_rank is not None

    def _announce_done(self) -> None:
        with contextlib.suppress(dist.DistError):  # rank 0 may have ended together with the store
            announce_done(self._notices, self._rank)

    def _thread_ended(self, end: threading.ExceptHookArgs) -> None:
        error = end.exc_value
        if error is None or self._world_size == 1 or not _is_ours(end.exc_traceback) or isinstance(error, SystemExit):
            self._old_hook(end)
            return
        self.report(error)


def _is_no_failure(error: BaseException) -> bool:
    """Return whether an error is a normal end. After a stop signal, each rank of the run ends by itself."""
    ends_well = isinstance(error, SystemExit) and not error.code
    return ends_well or isinstance(error, Interrupted | GeneratorExit)


def _is_broken_connection(error: BaseException) -> bool:
    """Return whether an error means only that the connection to another rank or to the store is lost."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, dist.DistError):
            return True
        if type(chain) is RuntimeError and _BROKEN.search(str(chain)):
            return True
        chain = chain.__cause__
    return False


def _lost_sentence(error: BaseException) -> str:
    stage = PROGRESS.text()
    return (
        f"another rank ended without a message or is unreachable{f', in {stage}' if stage else ''}; find the rank that "
        f"ended first, for example because of a lack of memory (connection error on this rank: {reason(error)})"
    )


def _is_ours(trace: TracebackType | None) -> bool:
    """Return whether the traceback of a thread begins in megappo."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == "threading":
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("megappo.")


def work_within(seconds: float, work: Callable[[], object]) -> None:
    """Run work for at most `seconds` seconds. The work may fail or never return."""

    def quietly() -> None:
        with contextlib.suppress(dist.DistError, OSError, ValueError):
            work()

    working = threading.Thread(target=quietly, daemon=True)
    working.start()
    working.join(seconds)
