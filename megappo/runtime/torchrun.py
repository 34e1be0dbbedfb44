"""torchrun whose last line is the reason of a failure: `python -m megappo.runtime.torchrun` takes torchrun's arguments.

torchrun itself ends with a traceback of its own through which a failure of its workers passed, and with exit code 1
whatever theirs was. Here the worker that failed first gives the exit code, and its sentence comes last.
"""

from __future__ import annotations

import logging
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
        print(sentence or f"megappo: rank {rank} ended with code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as stopped:
        print(f"megappo: ended by {stopped.sigval.name}", file=sys.stderr)
        return 128 + stopped.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
