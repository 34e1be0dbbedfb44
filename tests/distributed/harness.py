"""Starts worker programs under torchrun and hands back what they wrote."""

from __future__ import annotations

import os
import subprocess
import sys
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
