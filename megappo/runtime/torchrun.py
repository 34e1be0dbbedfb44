"""torchrun with the reason of a failure as its last line. `python -m megappo.runtime.torchrun` has torchrun's options.

torchrun itself ends with a traceback of its own code, and with exit code 1 for any exit code of its workers. This
module ends with the exit code of the worker that failed first, and prints the error of this worker last.

If another program already listens at the port of the head, torchrun's own rendezvous connects to this program and reads
pickles from it. In this module the machine of the head serves the rendezvous, and a busy port is an error.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from megappo.errors import REQUEUE, USER_ERROR, ConfigError
from megappo.observe.terminal.streams import prepare_streams
from megappo.runtime.launchers import EXIT_CODE
from megappo.runtime.memory.allocator import collections_put_off

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_STOPPED = f"megappo: stopped as requested (exit code {REQUEUE}); the same command continues the run"


def with_head(arguments: argparse.Namespace, environment: Mapping[str, str]) -> argparse.Namespace:
    """Return the arguments with the role of this machine in the rendezvous.

    The machine serves the rendezvous if the endpoint is its address, unless `MEGAPPO_IS_HEAD=no`. Raises ConfigError if
    the machine cannot listen at the endpoint.
    """
    from megappo.network.store import listening_problem  # imports torch, so the import waits until `main`

    conf, (host, _, port) = arguments.rdzv_conf or "", arguments.rdzv_endpoint.rpartition(":")
    if arguments.rdzv_backend != "c10d" or not host or "is_host" in conf or "store_type=file" in conf:
        return arguments
    host = host.strip("[]")
    is_head = environment.get("MEGAPPO_IS_HEAD", "yes") != "no" and listening_problem(host, 0) is None
    problem = listening_problem(host, int(port)) if is_head else None
    if problem is not None:
        raise ConfigError(
            f"no process can listen at the head {arguments.rdzv_endpoint}, which is this machine ({problem}); choose "
            "another port, or export MEGAPPO_IS_HEAD=no on other machines of the job that share its address"
        )
    arguments.rdzv_conf = ",".join(filter(None, [conf, f"is_host={str(is_head).lower()}"]))
    return arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workers. Returns the exit code of the worker that failed first, or 0 if no worker failed.

    After a stop signal to torchrun, returns the exit code of the workers if it is 0 or `REQUEUE` for all of them.
    """
    with collections_put_off():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

    # Each c10d rendezvous warns about `master_addr`, an option that launch/torchrun.sh does not set.
    logging.getLogger("torch.distributed.run").addFilter(lambda r: not str(r.msg).startswith("master_addr is only"))
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(lambda r: not _is_stop(r))
    ends = _record_ends()
    try:
        run(with_head(parse_args(arguments), os.environ))
    except ConfigError as error:
        print(f"megappo: error: {error}", file=sys.stderr)
        return USER_ERROR
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=_failure_order)
        error_file = _error_file(failure)
        code = error_file.get("extraInfo", {}).get(EXIT_CODE, failure.exitcode)
        reason = f"megappo: error: rank {rank} ended {_how(code)}" if code != REQUEUE else _STOPPED
        print(error_file.get("message") or reason, file=sys.stderr)
        return code if code > 0 else 128 - code
    except SignalException as stopped:
        if ends in ({REQUEUE}, {0}):
            print(_STOPPED if REQUEUE in ends else "megappo: the run is complete", file=sys.stderr)
            return REQUEUE if REQUEUE in ends else 0
        print(f"megappo: ended by {stopped.sigval.name}", file=sys.stderr)
        return 128 + stopped.sigval
    return 0


def _record_ends() -> set[int | None]:
    """Return a set that receives the exit codes of this machine's workers when torchrun ends them. torchrun discards
    the codes after a signal (torch 2.11 to 2.14). None is the code of a worker that is still running."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    ends: set[int | None] = set()
    shutdown = LocalElasticAgent._shutdown

    def recorded(agent: LocalElasticAgent, *arguments: Any, **options: Any) -> None:
        shutdown(agent, *arguments, **options)
        workers = getattr(agent._pcontext, "subprocess_handlers", {})
        ends.update(worker.proc.poll() for worker in workers.values())

    LocalElasticAgent._shutdown = recorded  # type: ignore[method-assign, assignment]
    return ends


def _is_stop(record: logging.LogRecord) -> bool:
    """Return whether torchrun logs the end of a stopped worker as a failure."""
    return str(record.msg).startswith("failed (exitcode") and isinstance(record.args, tuple) and REQUEUE in record.args


class _ErrorFile(TypedDict, total=False):
    """Content of torchrun's error file, with the fields that this module reads."""

    message: str
    extraInfo: dict[str, int]


def _error_file(failure: ProcessFailure) -> _ErrorFile:
    """Return the content of the error file of a failed worker; empty if the worker could not write the file."""
    return failure.message if isinstance(failure.message, dict) else {}


def _failure_order(of_rank: tuple[int, ProcessFailure]) -> tuple[int, bool]:
    """Return a sort key: the time of the failure, then whether the failure has no reason. torch's times are whole
    seconds. Within a second, a failure with a reason comes first."""
    _, failure = of_rank
    return failure.timestamp, not _error_file(failure)


def _how(code: int) -> str:
    """Return how a worker without a reason ended. The code is negative if a signal ended the worker, or greater than
    128 if a shell ran between torchrun and the worker."""
    number = -code if code < 0 else code - 128
    if number not in set(signal.Signals):
        return f"with code {code}"
    killed = ", for example for a lack of memory" if number == signal.SIGKILL else ""
    return f"by {signal.Signals(number).name}{killed}"


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main())
