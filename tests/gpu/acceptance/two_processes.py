"""Two processes on one device with collectives over gloo, for checks that require several ranks but no second GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megappo.network.store import free_port
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, judged, within
from tests.support.places import ROOT

_LONGEST_SECONDS = 80.0


def on_one_device(place: Place) -> Iterator[Row]:
    """Check the exchange of samples, and the output layer on two tensor parallel ranks."""
    results = run_two(place)
    wrong = results.pop("exchange")
    yield judged("exchange, 2 ranks", wrong == 0, f"{wrong:g} of 40 tensors wrong", wrong=wrong)
    values = {name: results.pop(name) for name in ("logprob", "entropy", "loss")}
    yield within("head over 2 ranks, float32", values, 5e-4)
    yield within("head over 2 ranks, float32: gradients", results, 2e-5)


def run_two(place: Place) -> dict[str, float]:
    """Run two_ranks.py and return its results. Raises RuntimeError with the end of the error output if a process
    fails."""
    out, port = Path(place.scratch) / "two.json", free_port("127.0.0.1")
    program = [sys.executable, "-m", "tests.gpu.acceptance.two_ranks", place.device]
    command = [*program, "tiny" if place.tiny else "whole", str(out)]
    ranks = []
    for rank in range(2):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        environment = {**os.environ, **variables}
        ranks.append(subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=_LONGEST_SECONDS)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(process.returncode for process in ranks):
        raise RuntimeError(next(s for s, p in zip(outputs, ranks, strict=True) if p.returncode).strip()[-300:])
    return dict(json.loads(out.read_text()))
