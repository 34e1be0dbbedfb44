"""torchrun whose last line is the reason of a failure: `python -m megappo.runtime.torchrun` takes torchrun's arguments.

torchrun itself ends with a traceback of its own code, and with exit code 1 whatever its workers' was. Here the worker
that failed first gives the exit code, and its sentence comes last.

Where another program already listens at the head's port, torchrun's own rendezvous joins it and reads pickles from
there. Here the head's machine serves the rendezvous, and a busy port is an error.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from megappo.errors import USER_ERROR, ConfigError
from megappo.observe.streams import prepare_streams
from megappo.runtime.heap import collections_put_off
from megappo.runtime.launchers import EXIT_CODE

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def with_head(arguments: argparse.Namespace, environment: Mapping[str, str]) -> argparse.Namespace:
    """Arguments extended by whether this machine serves the rendezvous: it does if the endpoint is its address, unless
    `MEGAPPO_IS_HEAD=no`. Raises ConfigError where it cannot listen there."""
    from megappo.runtime.store import listening_problem  # brings torch, which waits for `main`

    conf, (host, _, port) = arguments.rdzv_conf or "", arguments.rdzv_endpoint.rpartition(":")
    if arguments.rdzv_backend != "c10d" or not host or "is_host" in conf or "store_type=file" in conf:
        return arguments
    host = host.strip("[]")
    is_head = environment.get("MEGAPPO_IS_HEAD", "yes") != "no" and listening_problem(host, 0) is None
    problem = listening_problem(host, int(port)) if is_head else None
    if problem is not None:
        raise ConfigError(
            f"nothing can listen at the head {arguments.rdzv_endpoint}, which is this machine ({problem}); choose "
            "another port, or export MEGAPPO_IS_HEAD=no on other machines of the job that share its address"
        )
    arguments.rdzv_conf = ",".join(filter(None, [conf, f"is_host={str(is_head).lower()}"]))
    return arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workers; returns the exit code of the one that failed first, 0 where all ended well."""
    with collections_put_off():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

    # Each c10d rendezvous warns about `master_addr`, an option that launch/torchrun.sh does not set.
    logging.getLogger("torch.distributed.run").addFilter(lambda r: not str(r.msg).startswith("master_addr is only"))
    try:
        run(with_head(parse_args(arguments), os.environ))
    except ConfigError as error:
        print(f"megappo: error: {error}", file=sys.stderr)
        return USER_ERROR
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=_when_and_whether_it_says_why)
        said = _said(failure)
        code = said.get("extraInfo", {}).get(EXIT_CODE, failure.exitcode)
        print(said.get("message") or f"megappo: error: rank {rank} ended {_how(code)}", file=sys.stderr)
        return code if code > 0 else 128 - code
    except SignalException as stopped:
        print(f"megappo: ended by {stopped.sigval.name}", file=sys.stderr)
        return 128 + stopped.sigval
    return 0


class _Said(TypedDict, total=False):
    """Content of torchrun's error file, as far as it is read here."""

    message: str
    extraInfo: dict[str, int]


def _said(failure: ProcessFailure) -> _Said:
    """What a failed worker wrote to torchrun's error file; empty where it could not."""
    return failure.message if isinstance(failure.message, dict) else {}


def _when_and_whether_it_says_why(of_rank: tuple[int, ProcessFailure]) -> tuple[int, bool]:
    """Sort key: the time of a failure, then whether it has a reason. torch's times are whole seconds; within one, a
    failure with a reason comes first."""
    _, failure = of_rank
    return failure.timestamp, not _said(failure)


def _how(code: int) -> str:
    """How a worker ended that could not say it: the code is negative where a signal ended it, and above 128 where a
    shell was between it and torchrun."""
    number = -code if code < 0 else code - 128
    if number not in set(signal.Signals):
        return f"with code {code}"
    killed = ", as where the machine lacks memory" if number == signal.SIGKILL else ""
    return f"by {signal.Signals(number).name}{killed}"


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main())
