"""Starts worker programs under torchrun and hands back what they wrote."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WORKERS = Path(__file__).parent
ROOT = WORKERS.parents[1]


def launch(worker: str, processes: int, *arguments: object, timeout_seconds: float = 300) -> str:
    """Run tests/distributed/<worker> on so many processes; returns its output, fails with it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(WORKERS / worker), *map(str, arguments)]
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": ":".join(paths),
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return output


@contextmanager
def own_groups() -> Iterator[None]:
    """End the process groups that the block makes, on all ranks together. Each has threads; hundreds of them slow down
    everything that comes after."""
    import torch.distributed as dist

    before = set(dist.distributed_c10d._world.pg_map)
    yield
    gc.collect()  # models know their groups, and each other in circles
    dist.barrier()
    for group in [group for group in dist.distributed_c10d._world.pg_map if group not in before]:
        dist.destroy_process_group(group)
