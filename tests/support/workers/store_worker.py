"""Count the connections of a rank to the store while the rank listens to signals and the watchdog runs; see
test_exchange.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import torch.distributed as dist

import megappo.megatron  # noqa: F401 - prepares a machine without CUDA before Megatron-Core is imported
from megappo.config.schema import RuntimeSettings
from megappo.runtime.process import start_runtime
from megappo.runtime.watch.interrupts import interruptible
from megappo.runtime.watch.watchdog import Limits, Watchdog, watched


def main() -> None:
    with start_runtime(RuntimeSettings()) as runtime:
        watchdog = Watchdog(Path(sys.argv[1]), Limits(100.0), runtime)
        with watched(watchdog), interruptible(runtime) as interrupts:
            watchdog.enter("rollout")
            watchdog.made_tokens()
            interrupts.check()
            port = int(os.environ["MASTER_PORT"])
            to_store = [c for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == port]
            assert len(to_store) == 2, to_store
            dist.barrier()


if __name__ == "__main__":
    main()
