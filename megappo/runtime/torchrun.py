"""torchrun whose last line is the reason of a failure: `python -m megappo.runtime.torchrun` takes torchrun's arguments.

torchrun itself ends with a traceback of its own through which a failure of its workers passed, and with exit code 1
whatever theirs was. Here the worker that failed first gives the exit code, and its sentence comes last.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workers; the exit code of the one that failed first, 0 where all ended well."""
    # Of an option that launch/torchrun.sh does not set, with each rendezvous of the kind that it uses.
    logging.getLogger("torch.distributed.run").addFilter(lambda r: not str(r.msg).startswith("master_addr is only"))
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = failure.message
        sentence = message.get("message") if isinstance(message, dict) else None
        print(sentence or f"megappo: error: rank {rank} ended {_how(failure.exitcode)}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as stopped:
        print(f"megappo: ended by {stopped.sigval.name}", file=sys.stderr)
        return 128 + stopped.sigval
    return 0


def _how(code: int) -> str:
    """In words, for a worker that could not say it: negative where a signal ended it, and above 128 where a shell stood
    between it and torchrun."""
    number = -code if code < 0 else code - 128
    if number not in set(signal.Signals):
        return f"with code {code}"
    killed = ", as where the machine lacks memory" if number == signal.SIGKILL else ""
    return f"by {signal.Signals(number).name}{killed}"


if __name__ == "__main__":
    sys.exit(main())
