"""A mistake under a real torchrun: its sentence comes last."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.places import ROOT

SENTENCE = "megappo: error: run.seed is -1, must be at least 0; the nearest is 0"


@pytest.mark.waits
@pytest.mark.parametrize("program", ["torch.distributed.run", "megappo.runtime.torchrun"])
def test_the_sentence_comes_last_under_torchrun(program: str) -> None:
    start = [sys.executable, "-m", program, "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, "-m", "megappo", "train", "configs/quickstart.yaml", "run.seed=-1"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    lines = done.stderr.splitlines()
    if program == "megappo.runtime.torchrun":
        assert (done.returncode, lines[-1]) == (2, SENTENCE), done.stderr
        assert "Traceback" not in done.stderr
    else:  # whose own traceback nothing in a worker can keep away; the summary after it has the sentence
        assert (done.returncode, SENTENCE in done.stderr.rpartition("Root Cause")[2]) == (1, True), done.stderr
