"""Two processes share one device, collectives over gloo: what needs several ranks and no second GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megappo.runtime.store import free_port
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, judged, within
from tests.support.places import ROOT

_LONGEST_SECONDS = 80.0


def on_one_device(place: Place) -> Iterator[Row]:
    """The exchange of samples, and the output layer over two tensor parallel ranks."""
    found = run_two(place)
    wrong = found.pop("exchange")
    yield judged("exchange, 2 ranks", wrong == 0, f"{wrong:g} of 40 tensors wrong", wrong=wrong)
    values = {name: found.pop(name) for name in ("logprob", "entropy", "loss")}
    yield within("head over 2 ranks, float32", values, 5e-4)
    yield within("head over 2 ranks, float32: gradients", found, 2e-5)


def run_two(place: Place) -> dict[str, float]:
    """What two_ranks.py finds. Raises RuntimeError with its last words where it fails."""
    out, port = Path(place.scratch) / "two.json", free_port("127.0.0.1")
    program = [sys.executable, "-m", "tests.gpu.acceptance.two_ranks", place.device]
    words = [*program, "tiny" if place.tiny else "whole", str(out)]
    ranks = []
    for rank in range(2):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        given = {**os.environ, **variables}
        ranks.append(subprocess.Popen(words, env=given, cwd=ROOT, stderr=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=_LONGEST_SECONDS)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(process.returncode for process in ranks):
        raise RuntimeError(next(s for s, p in zip(said, ranks, strict=True) if p.returncode).strip()[-300:])
    return dict(json.loads(out.read_text()))
